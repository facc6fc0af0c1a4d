"""Fills file systems that a server uses while it serves, within a mount namespace of its own:
`unshare --map-root-user --mount python small_file_systems.py KIND FOLDER`; see `KINDS`."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import kserve
from inflight.access import key, keys_file, ledger
from inflight.access.key import KeyLimits
from supervised import CANARY, SHARED_MEMORY, Serving, serve

SIZE = "8m"
STUBS = ("llm", "tokenizer", "chat_tokenizer", "detokenizer")
# The doors pass it on; Triton copies it into the shared memory of a stub.
LARGE = "word " * 780_000
NUM_REQUESTS = 16
# The supervisor writes the health twice a second, doors take one of 3 s for none.
WATCHED_S = 5.0


def mount(path: Path) -> None:
    path.mkdir(exist_ok=True)
    options = ("-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs")
    subprocess.run(["mount", *options, str(path)], check=True)


def fill(path: Path) -> Path:
    """Write until there is no room; returns the file."""
    ballast = path / "ballast"
    with open(ballast, "ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return ballast


@contextlib.contextmanager
def kept_full(path: Path) -> Iterator[None]:
    """Whatever becomes free is taken at once, until the end of the `with` block."""
    is_over = threading.Event()

    def keep_full() -> None:
        while not is_over.wait(0.002):
            fill(path)

    filling = threading.Thread(target=keep_full)
    filling.start()
    try:
        yield
    finally:
        is_over.set()
        filling.join()
        (path / "ballast").unlink()


def post(serving: Serving, secret: str, route: str, **inputs: Any) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection(serving.http, timeout=60)
    try:
        path = f"/v2/models/{route}/generate"
        connection.request("POST", path, json.dumps(inputs), {"X-Api-Key": secret})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    except OSError:  # its door is being replaced
        return 0, {}
    finally:
        connection.close()


def disk(folder: Path) -> None:
    """The disk of the log, the runtime folder, the usage and the audit log."""
    small = folder / "small"
    mount(small)
    for variable, name in (("XDG_RUNTIME_DIR", "run"), ("XDG_STATE_HOME", "state")):
        os.environ[variable] = str(small / name)
        (small / name).mkdir(mode=0o700)
    made, secret = key.issue("acme", limits=KeyLimits())
    keys_file.add(folder / "keys.json", made)
    options = ("--keys", str(folder / "keys.json"), "--log-file", str(small / "log"))

    with serve(folder, "echo", *options) as serving:

        def answer() -> tuple[int, Any]:
            status, body = post(serving, secret, "generate", text_input=CANARY, max_tokens=16)
            return status, body.get("text_output")

        assert answer() == (200, CANARY)
        ballast = fill(small)
        num_children, num_answers = len(serving.children()), 1
        until = time.monotonic() + WATCHED_S
        while time.monotonic() < until:
            assert serving.health()[0] == 200
            assert answer() == (200, CANARY)
            num_answers += 1
            assert post(serving, "wrong", "generate", text_input="x")[0] == 401  # audited
            time.sleep(0.1)
        for what in ("http", "engine", "tokenizer"):
            victim = serving.pid_of(what)
            os.kill(victim, signal.SIGKILL)
            serving.wait_until(lambda what=what, pid=victim: is_replaced(serving, what, pid))
            serving.wait_until(lambda: answer() == (200, CANARY))
            num_answers += 1
        serving.wait_until(lambda: len(serving.children()) == num_children)
        assert os.statvfs(small).f_bavail == 0
        ballast.unlink()

        def used() -> int:
            return sum(day.requests for day in ledger.read(ledger.default_path()))

        serving.wait_until(lambda: used() >= num_answers)
        assert "Traceback" not in serving.shown.read_text()
    assert serving.process.wait(60) == 0
    print("served with a full disk")


def is_replaced(serving: Serving, what: str, victim: int) -> bool:
    try:
        return serving.pid_of(what) != victim
    except LookupError:
        return False


def shared_memory(folder: Path) -> None:
    """The shared memory between tritonserver and its stubs."""
    mount(SHARED_MEMORY)
    with serve(folder, "echo", "--grpc-guard") as serving:
        canary = serving.canary()
        stubs = [serving.pid_of(name) for name in STUBS]
        errors = []
        for ensemble in ("generate", "chat") * 2:
            name = "messages" if ensemble == "chat" else "text_input"
            try:
                kserve.ask(serving.grpc, kserve.request(ensemble, kserve.text(LARGE, name)))
            except kserve.Refused as refused:
                errors.append(str(refused))
            status, body = kserve.post(serving.http, ensemble, "generate", {name: LARGE})
            assert status in (400, 503)
            errors.append(json.loads(body)["error"])
            assert serving.canary() == canary
        assert len(errors) == 8, "each request has one error"
        full = [error for error in errors if "shared memory" in error]
        assert len(full) >= 4, errors
        assert not [error for error in errors if "/dev/shm" in error or "shm_region" in error]
        assert [serving.pid_of(name) for name in STUBS] == stubs
        assert serving.health()[0] == 200
    assert serving.process.wait(60) == 0
    print("served with full shared memory")


def shared_memory_of_others(folder: Path) -> None:
    """Other programs take all shared memory that the stubs do not have yet."""
    mount(SHARED_MEMORY)
    with serve(folder, "echo", "--grpc-guard") as serving:
        canary = serving.canary()
        pids = {name: serving.pid_of(name) for name in (*STUBS, "tritonserver", "engine")}
        fill(SHARED_MEMORY)
        assert os.statvfs(SHARED_MEMORY).f_bavail == 0
        assert [ask_many(serving) for _ in range(3)] == [[canary] * NUM_REQUESTS] * 3
        # No page is missing under what the stubs have: that would end them by SIGBUS.
        assert {name: serving.pid_of(name) for name in pids} == pids
        assert serving.health()[0] == 200
        # A server that is started again has no shared memory for its stubs.
        with kept_full(SHARED_MEMORY):  # also with what the stubs leave
            os.kill(serving.pid_of("llm"), signal.SIGKILL)
            serving.wait_until(lambda: "too little shared memory" in serving.health()[1])
            assert "/" not in json.loads(serving.health()[1])["error"]
        serving.wait_until_serving(canary)
        serving.wait_until(lambda: serving.health()[0] == 200)
        assert serving.pid_of("engine") == pids["engine"]
        assert set(SHARED_MEMORY.iterdir()) == serving.regions(), "failed starts leave nothing"
    assert serving.process.wait(60) == 0
    assert list(SHARED_MEMORY.iterdir()) == []
    print("served with shared memory that others had filled")


def ask_many(serving: Serving) -> list[str]:
    """The answers to requests at the same time."""
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        return list(pool.map(lambda number: serving.canary(), range(NUM_REQUESTS)))


KINDS = {
    "disk": disk,
    "shared-memory": shared_memory,
    "shared-memory-of-others": shared_memory_of_others,
}

if __name__ == "__main__":
    KINDS[sys.argv[1]](Path(sys.argv[2]))
