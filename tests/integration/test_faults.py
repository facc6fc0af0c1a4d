"""Faults of the machine and of operators: full file systems, a clock that jumps, signals at any
time. The server serves on, or ends and leaves nothing."""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest

from failpoint import set_failpoint
from inflight.errors import InflightError
from inflight.ipc import control, engine_client
from inflight.ipc.control import UnloadModel
from inflight.ipc.runtime_folder import folder_of
from kserve import Refused, Stream, request, tensor, text
from shifted_clock import ShiftedClock
from supervised import START_S, Serving, launch, serve, without_chat
from waiting import wait_until_ended

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

SUPPORT = Path(__file__).parents[1] / "support"
# Seconds after the start: the command itself, the engine, tritonserver with its stubs.
STARTS_S = (0.3, 1.5, 4.0)
EXIT_S = 60.0
HOUR_S = 3600
# Longer than each patience of the supervisor and the doors (3 to 4 s).
WATCHED_S = 5.0
# A stream of the echo engine alone would end too soon.
STEP_MS = 50


@pytest.fixture
def _slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    set_failpoint(monkeypatch, "slow", STEP_MS)


@pytest.mark.parametrize(
    "what",
    ["disk", "shared-memory", pytest.param("shared-memory-of-others", marks=pytest.mark.long)],
)
def test_a_full_file_system_ends_no_server(what: str) -> None:
    unshare = ["unshare", "--map-root-user", "--mount"]
    if subprocess.run([*unshare, "true"], check=False).returncode:
        # Many containers forbid namespaces to all but privileged users, and only one of its own
        # gives a process a small file system. Without one, the parts are tested in
        # tests/backend/core/test_mapped_file.py, tests/backend/ipc/test_health.py and
        # tests/backend/access/test_ledger.py, and for shared memory in the tests of the doors.
        pytest.skip("mount namespaces are not permitted here")
    # A short path: a runtime folder with sockets lies in it.
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*unshare, sys.executable, str(SUPPORT / "small_file_systems.py"), what, folder],
            cwd=folder,
            # Assertions of the script count.
            env={**os.environ, "PYTHONOPTIMIZE": ""},
            capture_output=True,
            text=True,
            timeout=220,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert "served with" in done.stdout


def endless(ensemble: str = "generate") -> object:
    inputs = [tensor("stream", "BOOL", True), tensor("ignore_eos", "BOOL", True)]
    return request(ensemble, text("word " * 50), *inputs, tensor("max_tokens", "INT32", 8000))


def assert_nothing_is_left(
    children: list[psutil.Process], regions: set[Path], folder: Path
) -> None:
    wait_until_ended(children)
    assert not folder.exists()
    assert not [region for region in regions if region.exists()]


@pytest.mark.usefixtures("_slow_steps")
def test_a_second_sigterm_ends_a_drain_and_leaves_nothing(tmp_path: Path) -> None:
    with serve(tmp_path, "echo", "--drain", "120", prepare=without_chat) as server:
        children, regions, folder = server.children(), server.regions(), server.runtime_folder
        stream = Stream(server.grpc, endless())
        stream.next()
        started = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        server.wait_until(lambda: server.health()[0] == 503)
        assert server.process.is_running() and stream.next(), "it drains"
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(EXIT_S) == 0
        assert time.monotonic() - started < 110, "not the time of the drain"
        with pytest.raises(Refused):
            list(stream)
    assert_nothing_is_left(children, regions, folder)


@pytest.mark.parametrize(
    "after_s", [STARTS_S[0], pytest.param(STARTS_S[1], marks=pytest.mark.long), STARTS_S[2]]
)
def test_sigterm_before_it_is_ready_leaves_nothing(tmp_path: Path, after_s: float) -> None:
    process = launch(tmp_path, "echo", prepare=without_chat)
    serving = Serving(process, "", "", tmp_path / "models", tmp_path / "shown", tmp_path / "log")
    try:
        children: set[psutil.Process] = set()
        regions: set[Path] = set()
        until = time.monotonic() + after_s
        while time.monotonic() < until and process.is_running():
            children |= set(serving.children())
            regions |= serving.regions()
            time.sleep(0.05)
        folder = folder_of(process.pid)
        process.send_signal(signal.SIGTERM)
        process.wait(EXIT_S)
    finally:
        if process.is_running():
            process.kill()
            process.wait()
    assert "Traceback" not in serving.shown.read_text()
    if not children and folder.exists():
        folder.rmdir()  # made by this test: the server had not begun
    assert_nothing_is_left(list(children), regions, folder)


@pytest.mark.parametrize("times", [1, 3])
def test_a_tritonserver_that_aborts_while_it_starts_is_started_again(
    tmp_path: Path, times: int
) -> None:
    """Twice at most; then the start fails with the reason."""
    for number in range(3):
        (tmp_path / str(number)).mkdir()
        if abort_while_it_starts(tmp_path / str(number), times):
            return
    raise AssertionError("it was ready before each abort")


def abort_while_it_starts(folder: Path, times: int) -> bool:
    """Check a start with so many aborts; false if a busy machine has missed the time for one.

    The last abort may come just after the server has loaded, so that no start has failed. If a
    server were started again more often than it may be, it would be ready at each try.
    """
    process = launch(folder, "echo", prepare=without_chat)
    serving = Serving(process, "", "", folder / "models", folder / "shown", folder / "log")
    aborted: set[int] = set()
    regions: set[Path] = set()
    deadline = time.monotonic() + START_S
    try:
        while process.poll() is None and "READY" not in serving.shown.read_text():
            assert time.monotonic() < deadline, serving.shown.read_text()
            with contextlib.suppress(LookupError, psutil.Error):
                pid = serving.pid_of("tritonserver")
                found = serving.regions()
                regions |= found
                # Its child that becomes a stub looks like it until then.
                is_it = psutil.Process(pid).ppid() == process.pid
                if is_it and pid not in aborted and len(aborted) < times and found:
                    runtime_folder = folder_of(process.pid)
                    aborted.add(pid)
                    os.kill(pid, signal.SIGABRT)
            time.sleep(0.05)  # a look at all processes takes as long
        is_ready = "READY" in serving.shown.read_text()
        if process.poll() is None and (len(aborted) < times or (times > 1 and is_ready)):
            return False
        assert len(aborted) == times
        if times == 1:
            assert is_ready
            process.send_signal(signal.SIGTERM)
        assert process.wait(EXIT_S) == (0 if times == 1 else 1)
    finally:
        if process.is_running():
            process.kill()
            process.wait()
    if times > 1:
        assert "error: tritonserver was killed by SIGABRT" in serving.shown.read_text()
    assert_nothing_is_left([], regions, runtime_folder)
    return True


@pytest.mark.usefixtures("_slow_steps")
def test_sigterm_while_a_model_unloads_leaves_nothing(tmp_path: Path) -> None:
    """Its streams finish within the time of the drain, or get an error; the command gets one."""
    with serve(tmp_path, "echo", "--model-control", prepare=without_chat) as server:
        children, regions, folder = server.children(), server.regions(), server.runtime_folder
        socket = folder / control.SOCKET
        stream = Stream(server.grpc, endless())
        stream.next()
        outcomes: list[str] = []

        def unload() -> None:
            try:
                control.call(socket, UnloadModel("llm"))
                outcomes.append("unloaded")
            except InflightError as error:
                outcomes.append(str(error))

        thread = threading.Thread(target=unload)
        thread.start()

        def is_unloading() -> bool:
            (status,) = control.call(socket, control.ListModels()).models
            return status.state == "unloading"

        server.wait_until(is_unloading)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(2 * EXIT_S) == 0
        thread.join(EXIT_S)
        assert not thread.is_alive() and len(outcomes) == 1
        with pytest.raises(Refused):
            list(stream)
    assert_nothing_is_left(children, regions, folder)


@pytest.mark.parametrize("options", [(), ("--model-control",)], ids=["plain", "model control"])
def test_a_socket_that_is_removed_does_not_keep_fronts_out(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    """By a program that cleans folders. Its engine, or the link to it, is replaced."""
    with serve(tmp_path, "echo", *options, prepare=without_chat) as server:
        canary, engine = server.canary(), server.pid_of("engine")
        path = engine_client.socket_path(server.models / "llm", server.process.pid)
        path.unlink()
        server.wait_until(path.exists)
        server.wait_until_serving(canary)
        assert (server.pid_of("engine") == engine) == bool(options)
        server.wait_until(lambda: server.health()[0] == 200)
        tritonserver = server.pid_of("tritonserver")
        with server.restarting("tritonserver"):
            os.kill(tritonserver, signal.SIGKILL)
        server.wait_until_serving(canary)
        assert server.pid_of("tritonserver") != tritonserver


def date_of(serving: Serving) -> float:
    """The door's wall clock, in seconds since 1970."""
    connection = http.client.HTTPConnection(serving.http, timeout=60)
    try:
        connection.request("GET", "/v2/health/live")
        response = connection.getresponse()
        assert response.status == 200
        date = response.getheader("Date")
        assert date is not None
        return email.utils.parsedate_to_datetime(date).timestamp()
    finally:
        connection.close()


@pytest.mark.usefixtures("_slow_steps")
def test_a_jump_of_the_clock_expires_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour ahead and two hours back under a stream, in the supervisor, the doors, the engine
    and its sandboxes."""
    try:
        clock = ShiftedClock(tmp_path, monkeypatch)
    except FileNotFoundError:
        # Only a preloaded library shifts the clock of one process, and it must be compiled.
        # tests/test_wall_clock.py tests the same claim by the sources.
        pytest.skip("there is no C compiler")
    with serve(tmp_path, "echo", "--grpc-guard") as server:
        canary, pids = server.canary(), {child.pid for child in server.children()}
        stream = Stream(server.grpc, endless())
        num_tokens = stream.next()["num_output_tokens"]
        for shift_s in (HOUR_S, -HOUR_S):
            clock.jump(shift_s)
            server.wait_until(lambda s=shift_s: is_near(date_of(server) - time.time(), s))
            until = time.monotonic() + WATCHED_S
            while time.monotonic() < until:
                assert server.health() == (200, "")
                num_tokens += stream.next()["num_output_tokens"]
            assert server.canary() == canary
        assert num_tokens > 2
        stream.cancel()
        assert {child.pid for child in server.children()} == pids, "nothing was restarted"


def is_near(found: float, expected: float) -> bool:
    return abs(found - expected) < 60
