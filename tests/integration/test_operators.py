"""The commands of operators, with a real server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from failpoint import failpoint
from kserve import Stream, request, tensor, text
from supervised import Serving, serve, without_chat

pytestmark = pytest.mark.integration

INFLIGHT = Path(sys.executable).parent / "inflight"
# On a busy machine torch alone takes a while to import, for the checks of the machine.
SELF_TEST_S = 150.0


def inflight(*arguments: str) -> tuple[int, Any]:
    """Exit status, and what it prints, which is JSON."""
    done = subprocess.run(
        [str(INFLIGHT), *arguments, "--json"], stdout=subprocess.PIPE, timeout=SELF_TEST_S
    )
    return done.returncode, json.loads(done.stdout)


@pytest.mark.alone
def test_the_self_test_passes() -> None:
    """Within its limit of a minute, of which it takes some seconds."""
    status, checks = inflight("doctor", "--self-test")
    names = [check["name"] for check in checks]
    assert [check for check in checks if check["status"] == "broken"] == []
    assert names[names.index("start") :] == [
        *("start", "Triton", "metrics", "HTTP", "HTTP stream", "HTTP error"),
        *("gRPC", "gRPC stream", "gRPC error", "cancel", "stop"),
    ]
    assert status == 0


def test_ps_lists_a_server_and_its_requests(tmp_path: Path) -> None:
    def listed(server: Serving) -> dict[str, Any]:
        status, servers = inflight("ps")
        assert status == 0
        (found,) = (one for one in servers if one["pid"] == server.process.pid)
        return dict(found)

    endless = tensor("max_tokens", "INT32", 8000), tensor("ignore_eos", "BOOL", True)
    before = time.monotonic()
    with failpoint("slow", 40), serve(tmp_path, "echo", prepare=without_chat) as server:
        found = listed(server)
        assert (found["state"], found["in_flight"]) == ("ready", 0)
        assert (found["http"], found["grpc"]) == (server.http, server.grpc)
        assert found["models"] == ["detokenizer", "generate", "llm", "tokenizer"]
        assert 0 < found["uptime_s"] <= time.monotonic() - before + 1
        stream = Stream(
            server.grpc, request("generate", text("Hi"), tensor("stream", "BOOL", True), *endless)
        )
        stream.next()
        assert listed(server)["in_flight"] == 1
        stream.cancel()


def test_run_starts_a_server_chats_and_stops_it(tmp_path: Path) -> None:
    with failpoint("slow", 1):
        done = subprocess.run(
            [str(INFLIGHT), "run", "--set", "device=echo", "--max-tokens", "8"],
            input='What is new?\n"""\nSeveral\nlines\n"""\n/stats\n/model\n/bye\nnot sent\n',
            capture_output=True,
            text=True,
            timeout=SELF_TEST_S,
            env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip().splitlines()) >= 2
    assert "8 out, first token after" in done.stderr
    assert "* chat" in done.stderr
    assert not any(path.name.isdigit() for path in (tmp_path / "inflight").iterdir())


def test_a_killed_run_leaves_no_server(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    command = [str(INFLIGHT), "run", "--set", "device=echo"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment) as process:
        wait_until(lambda: any(tmp_path.glob("inflight/*/health.json")))
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 2
        process.kill()
    wait_until(lambda: not any(child.is_running() for child in children))


def wait_until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)
