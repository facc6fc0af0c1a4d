"""Starting, draining and stopping, by API and by `inflight serve`, with a fake tritonserver."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fake_tritonserver
from inflight.deploy import installation
from inflight.deploy.tritonserver import server as running
from inflight.deploy.tritonserver import stubs
from inflight.deploy.tritonserver.server import Server
from inflight.errors import CapacityError, ConfigError, EngineError
from inflight.ipc import engine_client, shared_memory

WAIT_S = 60.0
FREE = (0, 0, 0)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Server]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(running, "TRITON_EXIT_S", 0.5)
    monkeypatch.setattr(running, "SETTLE_S", 0.05)

    def build(*, drain_s: float = 5.0, **behaviour: Any) -> Server:
        program = fake_tritonserver.install(tmp_path / "triton", **behaviour)
        monkeypatch.setenv(installation.SERVER_VARIABLE, str(program))
        (tmp_path / "repository" / "plain").mkdir(parents=True)
        return Server(
            [tmp_path / "repository"],
            ports=FREE,
            log_file=tmp_path / "log",
            drain_s=drain_s,
        )

    return build


def add_model_with_engine(server: Server) -> None:
    version = server.repositories[0] / "llm" / "1"
    version.mkdir(parents=True)
    (version / "engine.json").write_text("{}")


class FakeEngine:
    """Attached engines, as `drain` sees them: `counts` are the requests in flight, one per look."""

    def __init__(self, counts: list[int]) -> None:
        self.counts = counts
        self.calls: list[str] = []

    def drain(self) -> None:
        self.calls.append("drain")

    def stats(self) -> Any:
        self.calls.append("stats")
        count = self.counts.pop(0) if len(self.counts) > 1 else self.counts[0]
        return SimpleNamespace(num_running=count, num_waiting=0, num_suspended=0)

    def close(self) -> None:
        self.calls.append("close")


def arguments(server: Server) -> list[str]:
    first = server.log_file.read_text().splitlines()[0]
    found: list[str] = json.loads(first.removeprefix("arguments "))
    return found


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_server_starts_lists_its_models_and_stops(make: Callable[..., Server]) -> None:
    with make() as server:
        pid = server.pid
        assert server.is_ready()
        assert server.models() == ["chat", "llm"]
    assert not is_running(pid)


def test_it_listens_on_loopback_alone(make: Callable[..., Server]) -> None:
    with make() as server:
        given = arguments(server)
        http, grpc, metrics = (
            getattr(server.endpoints, name).split(":")[1] for name in ("http", "grpc", "metrics")
        )
    for kind, port in (("http", http), ("grpc", grpc), ("metrics", metrics)):
        assert f"--{kind}-address=127.0.0.1" in given
        assert f"--{kind}-port={port}" in given
    assert "--model-control-mode=none" in given
    assert f"--model-repository={server.repositories[0]}" in given


def test_a_ctrl_c_in_the_terminal_does_not_reach_tritonserver(make: Callable[..., Server]) -> None:
    """It is in a session of its own; we drain first."""
    with make() as server:
        line = server.log_file.read_text().splitlines()[1].split()
    assert line[1] == line[3]


def test_a_server_that_does_not_end_at_sigterm_is_ended(make: Callable[..., Server]) -> None:
    """As tritonserver 2.51 does not while a client holds an idle stream."""
    server = make(stubborn=True)
    server.start()
    server.wait_ready(WAIT_S)
    pid = server.pid
    assert server.stop() == 0
    assert not is_running(pid)


def test_a_server_without_stubs_is_not_awaited(
    make: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "TRITON_EXIT_S", 600.0)
    with make(hanging_stub=True, ends_stub=True) as server:
        pid = server.pid
    assert not is_running(pid)


def test_a_stub_that_hangs_does_not_outlive_its_server(
    make: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "CHILDREN_EXIT_S", 0.2)
    started = make(hanging_stub=True)
    started.start()
    started.wait_ready(WAIT_S)
    (line,) = [line for line in started.log_file.read_text().splitlines() if "stub" in line[:4]]
    stub = int(line.split()[1])
    assert is_running(stub)
    started.stop()
    wait_until(lambda: not is_running(stub))


@pytest.mark.parametrize("end", [Server.stop, Server.kill])
def test_the_shared_memory_of_a_stub_does_not_stay(
    make: Callable[..., Server],
    end: Callable[[Server], object],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(running, "CHILDREN_EXIT_S", 0.1)
    monkeypatch.setattr(stubs, "KILLED_EXIT_S", 0.1)
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)
    started = make(hanging_stub=True)
    own = tmp_path / f"{started.region_prefix}1"
    other = tmp_path / f"{shared_memory.region_prefix(os.getpid())}another_1"
    own.touch()
    other.touch()
    started.start()
    started.wait_ready(WAIT_S)
    end(started)
    assert not own.exists()
    assert other.exists()


def test_requests_in_flight_finish_before_sigterm(
    make: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine([3, 3, 1, 0])
    monkeypatch.setattr(engine_client, "attach", lambda *args, **more: engine)
    server = make()
    add_model_with_engine(server)
    server.start()
    server.wait_ready(WAIT_S)
    engine.calls.clear()
    seen: list[int] = []
    running: list[bool] = []

    def waiting(num_in_flight: int) -> None:
        seen.append(num_in_flight)
        running.append(server.is_running())

    assert server.stop(waiting) == 0
    assert seen == [3, 1, 0]
    assert all(running)
    assert engine.calls == ["drain", "stats", "stats", "stats", "stats", "close"]


def test_a_drain_that_takes_too_long_says_how_many_are_cut(
    make: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine([2])
    monkeypatch.setattr(engine_client, "attach", lambda *args, **more: engine)
    server = make(drain_s=0.2)
    add_model_with_engine(server)
    server.start()
    server.wait_ready(WAIT_S)
    assert server.stop() == 2
    assert not server.is_running()


def test_a_dead_engine_does_not_hold_up_the_stop(
    make: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    def attach(*args: Any, **more: Any) -> Any:
        raise CapacityError("no engine is listening")

    monkeypatch.setattr(engine_client, "attach", attach)
    server = make()
    add_model_with_engine(server)
    server.start()
    server.wait_ready(WAIT_S)
    assert server.stop() == 0


def test_a_model_that_cannot_load_is_one_line_and_nothing_is_left(
    make: Callable[..., Server],
) -> None:
    line = (
        "2026-11-21T03:28:29Z E 1 model_lifecycle.cc:642] \"failed to load 'llm' version 1: "
        "Internal: engine.json: unknown key 'modell'; did you mean 'model'?\\n\\nAt:\\n  x.py\""
    )
    server = make(lines=(line,), status=1)
    with pytest.raises(ConfigError) as caught, server:
        pass
    assert (
        str(caught.value) == "model llm: engine.json: unknown key 'modell'; did you mean 'model'?"
    )
    assert not server.is_running()


def test_the_engines_error_takes_precedence_over_the_log(
    make: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    def attach(*args: Any, **more: Any) -> Any:
        raise ConfigError("model: /nowhere does not exist")

    monkeypatch.setattr(engine_client, "attach", attach)
    server = make(lines=("failed to load 'llm' version 1: Internal: no engine",))
    add_model_with_engine(server)
    server.start()
    # `wait_ready` attaches to engines until the server is ready, which this one is at once.
    monkeypatch.setattr(server, "is_ready", lambda: "llm" in server._failures)
    server.wait_ready(WAIT_S)
    server.kill()
    assert str(server._why_it_ended()) == "model llm: model: /nowhere does not exist"


def test_a_silent_crash_of_the_server_names_its_log(make: Callable[..., Server]) -> None:
    server = make(status=7)
    server.start()
    with pytest.raises(EngineError, match=r"status 7; log: .*log"):
        server.wait_ready(WAIT_S)


def test_a_missing_repository_is_refused_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        Server([tmp_path / "nowhere"], ports=FREE).start()


def test_a_repository_without_models_is_refused(make: Callable[..., Server]) -> None:
    server = make()
    (server.repositories[0] / "plain").rmdir()
    with pytest.raises(ConfigError, match=r"has no models; create one with `inflight repo init`"):
        server.start()


@pytest.mark.parametrize("place", ["", "file/x.log"])
def test_a_log_that_cannot_be_written_is_named(
    make: Callable[..., Server], tmp_path: Path, place: str
) -> None:
    (tmp_path / "file").touch()
    repositories = make().repositories
    server = Server(repositories, ports=FREE, log_file=tmp_path / place)
    with pytest.raises(ConfigError, match=r"log file .* cannot be written .*--log-file"):
        server.start()


def test_a_server_does_not_outlive_the_process_that_started_it(
    make: Callable[..., Server], tmp_path: Path
) -> None:
    make()  # lays out the installation and sets the environment
    code = (
        "import time; from pathlib import Path\n"
        "from inflight.deploy.tritonserver.server import Server\n"
        f"server = Server([Path({str(tmp_path / 'repository')!r})], ports=(0, 0, 0),"
        f" log_file=Path({str(tmp_path / 'log')!r}))\n"
        "server.start(); server.wait_ready(); print(server.pid, flush=True); time.sleep(600)"
    )
    starter = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    with starter.stdout:
        pid = int(starter.stdout.readline())
    assert is_running(pid)
    starter.kill()
    starter.wait()
    wait_until(lambda: not is_running(pid))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_ends_well_at_a_signal(
    make: Callable[..., Server], tmp_path: Path, number: signal.Signals
) -> None:
    make()
    process = _serve(tmp_path)
    wait_until(lambda: "READY" in (tmp_path / "shown").read_text())
    process.send_signal(number)
    assert process.wait(WAIT_S) == 0
    shown = (tmp_path / "shown").read_text()
    assert "inflight chat --url 127.0.0.1:" in shown
    assert shown.rstrip().endswith("stopped")


def test_a_second_signal_stops_at_once(make: Callable[..., Server], tmp_path: Path) -> None:
    make(stubborn=True)
    process = _serve(tmp_path, patch="server.TRITON_EXIT_S = 60")
    wait_until(lambda: "READY" in (tmp_path / "shown").read_text())
    process.send_signal(signal.SIGINT)
    wait_until(lambda: "stopping" in (tmp_path / "shown").read_text())
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert process.wait(WAIT_S) == 0
    assert "stopped immediately" in (tmp_path / "shown").read_text()


def test_serve_replaces_a_tritonserver_that_exits(
    make: Callable[..., Server], tmp_path: Path
) -> None:
    make()
    process = _serve(tmp_path)
    wait_until(lambda: "READY" in (tmp_path / "shown").read_text())
    words = (tmp_path / "log").read_text().splitlines()[1].split()
    os.kill(int(words[1]), signal.SIGKILL)
    wait_until(lambda: "ready again" in (tmp_path / "shown").read_text())
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT_S) == 0
    assert "tritonserver was killed by SIGKILL" in (tmp_path / "shown").read_text()


def test_verbose_shows_what_tritonserver_prints(
    make: Callable[..., Server], tmp_path: Path
) -> None:
    make(lines=("a line of the log",))
    process = _serve(tmp_path, arguments=", verbose=True")
    wait_until(lambda: "READY" in (tmp_path / "shown").read_text())
    process.send_signal(signal.SIGINT)
    assert process.wait(WAIT_S) == 0
    assert "a line of the log" in (tmp_path / "shown").read_text()


def _serve(tmp_path: Path, patch: str = "", arguments: str = "") -> subprocess.Popen[bytes]:
    code = (
        "import sys; from pathlib import Path; from inflight.cli import serve\n"
        "from inflight.deploy.tritonserver import server\n"
        f"{patch}\n"
        "from inflight.supervision.options import ServeOptions\n"
        "from inflight.supervision.supervisor import Supervisor\n"
        "options = ServeOptions(ports=(0, 0, 0, 0), gateway_port=None,"
        f" log_file=Path({str(tmp_path / 'log')!r}))\n"
        f"supervisor = Supervisor([Path({str(tmp_path / 'repository')!r})], options)\n"
        f"sys.exit(serve.run(supervisor{arguments}))"
    )
    with open(tmp_path / "shown", "wb") as shown:
        return subprocess.Popen([sys.executable, "-c", code], stderr=shown)
