"""The HTTP door as a process: health, limits, signals, logs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jiter
import psutil
import pytest

from http_door import BODY, GET, LIMITS, a_door, ask, head, post, receive, sized
from inflight.deploy.file_limit import raise_file_limit
from inflight.ipc.metrics import request_counts
from otlp_collector import attributes, collecting
from waiting import PATIENCE_S, wait_until

# Health


def test_probes_are_answered_from_the_health_file(tmp_path: Path) -> None:
    with a_door(tmp_path) as door:
        assert ask(door, "GET", "/v2/health/ready")[0] == 200
        assert ask(door, "GET", "/v2/models/echo/ready")[0] == 200
        assert ask(door, "GET", "/v2/models/unknown/ready")[0] == 404
        door.set(is_ready=False, reason="the engine of llm restarts")
        status, headers, reply = ask(door, "GET", "/v2/health/ready")
        assert (status, headers["retry-after"]) == (503, "1")
        assert json.loads(reply) == {"error": "the engine of llm restarts"}
        assert ask(door, "GET", "/v2/health/live")[0] == 200
        assert ask(door, "GET", "/v2/models/echo/ready")[0] == 503
        assert post(door, BODY) == (503, '{"error":"the engine of llm restarts"}')
        door.set(is_ready=False, is_live=False)
        assert ask(door, "GET", "/v2/health/live")[0] == 503
        door.set(is_ready=True)
        assert post(door, BODY)[0] == 200
        assert not any("health" in path for path, _ in door.triton.bodies)


def test_the_index_is_that_of_the_health_file(tmp_path: Path) -> None:
    with a_door(tmp_path) as door:
        door.models = ["llm"]
        door.set(is_ready=True)
        status, _, reply = ask(door, "POST", "/v2/repository/index", b"{}")
        assert status == 200
        assert json.loads(reply) == [{"name": "llm", "version": "1", "state": "READY"}]
        assert ask(door, "POST", "/v2/repository/index", b"[")[0] == 400


def test_without_a_supervisor_nothing_is_ready(tmp_path: Path) -> None:
    with a_door(tmp_path) as door:
        door.health.unlink()
        time.sleep(0.15)  # the door reads it ten times a second
        assert ask(door, "GET", "/v2/health/live")[0] == 503
        assert post(door, BODY)[0] == 503


def test_no_triton_is_503(tmp_path: Path) -> None:
    with a_door(tmp_path) as door:
        door.triton.shutdown()
        door.triton.server_close()
        assert post(door, BODY)[0] == 503
        assert ask(door, "GET", "/v2/models/echo")[0] == 503


# The process


def test_connections_over_the_limit_are_refused(tmp_path: Path) -> None:
    with a_door(tmp_path, limits={"max_connections": 5}) as door, contextlib.ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(door.connect())
        reply = door.raw(head(start=GET.format("/v2/health/live")))
        assert b" 503 " in reply
        assert b"retry-after: 1" in reply.lower()


def test_a_door_without_descriptors_recovers(tmp_path: Path) -> None:
    """Connections beyond its limit of open files are closed; later ones are served."""
    raise_file_limit()  # of this process
    limits = {**LIMITS, "max_connections": 4096}
    limited = ("prlimit", "--nofile=1024:1024")
    with a_door(tmp_path, limits=limits, prefix=limited) as door, contextlib.ExitStack() as held:
        for _ in range(1200):
            held.enter_context(door.connect())
        with pytest.raises(OSError):
            ask(door, "GET", "/v2/health/live")
        held.close()

        def serves() -> bool:
            with contextlib.suppress(OSError):
                return post(door, BODY)[0] == 200
            return False

        wait_until(serves)
        assert door.process.poll() is None


def test_bodies_of_all_requests_are_bounded_together(tmp_path: Path) -> None:
    limits = {**LIMITS, "max_buffered_bytes": 100_000}
    with a_door(tmp_path, limits=limits) as door, door.connect() as first:
        first.sendall(head("Content-Length: 90000") + b"x" * 80_000)
        wait_until(lambda: post(door, b"x" * 50_000)[0] == 503)
        assert post(door, BODY)[0] == 200
        first.close()
        wait_until(lambda: post(door, b"x" * 50_000)[0] == 400)


def test_sigterm_lets_requests_in_flight_finish(tmp_path: Path) -> None:
    with a_door(tmp_path, "--drain", "120") as door, door.connect() as sock:
        sock.sendall(sized(BODY).replace(b"echo/generate", b"endless/generate_stream", 1))
        assert sock.recv(100)
        idle = door.connect()
        door.process.send_signal(signal.SIGINT)
        door.process.send_signal(signal.SIGTERM)
        assert receive(idle) == b""
        idle.close()
        assert door.process.poll() is None
        with pytest.raises(OSError):
            door.connect()
        assert sock.recv(100)
        sock.close()
        assert door.process.wait(PATIENCE_S) == 0


def test_sigterm_ends_what_is_not_over_in_time(tmp_path: Path) -> None:
    with a_door(tmp_path, "--drain", "1") as door, door.connect() as sock:
        sock.sendall(sized(BODY).replace(b"echo/generate", b"endless/generate_stream", 1))
        assert sock.recv(100)
        door.process.send_signal(signal.SIGTERM)
        assert door.process.wait(PATIENCE_S) == 0


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    program = """if True:
        import os, subprocess, sys, time
        command = [sys.executable, "-m", "inflight.door.http_door", *sys.argv[1:]]
        door = subprocess.Popen([*command, "--parent", str(os.getpid())])
        print(door.pid, flush=True)
        time.sleep(600)
    """
    options = ["--listen", "127.0.0.1:0", "--upstream", "127.0.0.1:9", "--health", str(tmp_path)]
    parent = subprocess.Popen(
        [sys.executable, "-c", program, *options], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    wait_until(child.net_connections)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    child.wait(PATIENCE_S)


def test_it_starts_without_heavy_imports() -> None:
    program = (
        "import sys; import inflight.door.http_door; "
        "print({'torch', 'numpy', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


def test_the_access_log_has_no_prompts(tmp_path: Path) -> None:
    with a_door(tmp_path, "--access-log") as door:
        post(door, {"text_input": "a secret"})
        ask(door, "GET", "/v2/models/%0a%1b/config")
        door.process.send_signal(signal.SIGTERM)
        assert door.process.stdout is not None
        lines = door.process.stdout.read().splitlines()
    probe, *records = [json.loads(line) for line in lines]
    assert probe["path"] == "/v2/health/live"
    assert [one["status"] for one in records] == [200, 404]
    assert "secret" not in "".join(lines)
    assert os.fspath(tmp_path) not in "".join(lines)


@pytest.mark.alone
def test_a_body_of_many_values_delays_no_other_request(tmp_path: Path) -> None:
    """Checked on the event loop, it delays probes by the time of the whole check: three to five
    times that of the parser, which does not yield."""
    body = json.dumps({"text_input": [{}] * 1_000_000}).encode()
    started = time.monotonic()
    jiter.from_json(body)
    parser_s = time.monotonic() - started
    with a_door(tmp_path, limits={}) as door:
        found: list[tuple[int, str]] = []
        sender = threading.Thread(target=lambda: found.append(post(door, body)))
        sender.start()
        delays = []
        while sender.is_alive():
            started = time.monotonic()
            assert ask(door, "GET", "/v2/health/live")[0] == 200
            delays.append(time.monotonic() - started)
        sender.join()
    assert found[0][0] == 400 and "text_input: is nested" in found[0][1]
    assert max(delays) < 2 * parser_s + 0.03


def test_requests_are_counted_by_status_and_probes_are_not(tmp_path: Path) -> None:
    counts = ("--counts", str(tmp_path / "http.requests"))
    with a_door(tmp_path, *counts) as door:
        assert post(door, {"text_input": "x"})[0] == 200
        assert post(door, b"{")[0] == 400
        assert ask(door, "GET", "/nothing")[0] == 404
        assert ask(door, "GET", "/v2/health/ready")[0] == 200
    assert request_counts.read(tmp_path, "http") == {"200": 1, "400": 1, "404": 1}


def test_spans_reach_the_collector(tmp_path: Path) -> None:
    with collecting() as collector:
        with a_door(tmp_path, "--otlp-endpoint", collector.url) as door:
            assert post(door, {"text_input": "xyzzy"})[0] == 200
            door.process.terminate()
            assert door.process.wait(PATIENCE_S) == 0
        (span,) = collector.wait_for(1)
    found = attributes(span)
    assert found["gen_ai.request.model"] == "echo" and found["inflight.status"] == "200"
    assert b"xyzzy" not in b"".join(collector.bodies)
