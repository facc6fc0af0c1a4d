"""The engine process: `python -m inflight.ipc.engine_main SOCKET ENGINE_JSON OWNER_PID KIND`.

It listens before it loads, so that peers see the progress. It exits with its owner; if that is a
tritonserver, also after the last front.
Threads: one accepts, two per peer read and write, the main one loads the model and runs the loop.
Only the main thread touches the engine.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from inflight import config as settings
from inflight import log
from inflight.checkpoint.locate import locate
from inflight.core.quarantine import Quarantine
from inflight.core.request import Request, TokenEvent
from inflight.engine.engine import Engine
from inflight.engine.stats import Stats
from inflight.errors import EngineError, InflightError
from inflight.ipc.cleanup import janitor
from inflight.ipc.crash_report import CrashReport
from inflight.ipc.engine_client import heartbeat_path
from inflight.ipc.frames import (
    PROTOCOL,
    Cancel,
    Connection,
    Delivered,
    Drain,
    Frame,
    GetMetrics,
    GetStats,
    Hello,
    LoadFailed,
    Loading,
    Refused,
    StepEvents,
    Submit,
    Welcome,
)
from inflight.ipc.gpu import power
from inflight.ipc.gpu.ledger import GpuLedger, Reservation
from inflight.ipc.heartbeat import Heartbeat
from inflight.ipc.owner import Owner
from inflight.ipc.processes import Process, end_with
from inflight.ipc.request_owners import RequestOwners
from inflight.ipc.runtime_folder import folder_of, gpu_folder, remove_folder_of
from inflight.ipc.shared_memory import stubs_left_by
from inflight.ipc.sockets.accepting import accept_connections
from inflight.ipc.sockets.private_socket import listen
from inflight.kv.gpu import Gpu
from inflight_kernels.runtime.host_process import limit_spinning, return_freed_memory

logger = logging.getLogger("inflight.engine")

# A front that died is replaced within about 2 s; the prefix cache survives it.
LAST_FRONT_GRACE_S = 3.0
FIRST_FRONT_GRACE_S = 30.0
# A peer that leaves this many frames unread is disconnected: they would fill our memory.
MAX_OUTBOX = 100_000
# Until the errors of the last step have reached the fronts of an engine that exits by itself.
LAST_EVENTS_S = 1.0
IDLE_POLL_S = 0.05
COMPILING_POLL_S = 0.002
# Between two beats of an idle engine; a supervisor kills an engine that is overdue.
IDLE_BEAT_S = 1.0
BEAT_PATIENCE_S = 3.0
# Until the settings are read.
STARTING_PATIENCE_S = 120.0


class Peer:
    """One attached process. `send` never blocks."""

    def __init__(self, connection: Connection, hello: Hello, number: int) -> None:
        self.connection = connection
        self.role = hello.role
        self.number = number
        self._outbox: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name=f"write-{number}", daemon=True)
        self._writer.start()

    def send(self, frame: Frame) -> None:
        if self._outbox.qsize() > MAX_OUTBOX:
            self.close()
        else:
            self._outbox.put(frame)

    def finish(self, timeout: float) -> None:
        """Wait until what was sent before has left, for `timeout` seconds; nothing follows it."""
        self._outbox.put(None)
        self._writer.join(timeout)

    def close(self) -> None:
        self._outbox.put(None)
        self.connection.close()

    def _write(self) -> None:
        # The reader thread notices that the peer has disconnected.
        with contextlib.suppress(OSError):
            while (frame := self._outbox.get()) is not None:
                self.connection.send(frame)


class PeerClosed:
    """In the inbox: the peer has disconnected."""


Command = tuple[Peer, Frame | PeerClosed]


class Hub:
    """Accepts peers, reads their frames into one inbox, exits the process after the last front.

    Args:
        path: of the socket.
        owner: the engine exits with it.
        is_supervised: whether the owner is a supervisor; else the engine also exits when no front
            is attached for a while.

    Attributes:
        requests: whose they are; changed only by the loop.
    """

    def __init__(self, path: Path, owner: Process, *, is_supervised: bool) -> None:
        self._path = path
        self._owner = owner
        self._is_supervised = is_supervised
        self._lock = threading.Lock()
        self._peers: dict[int, Peer] = {}
        self._next_number = 1
        self._greeting: Frame = Loading("starting", 0.0)
        self._without_front_since = time.monotonic()
        self._grace = FIRST_FRONT_GRACE_S
        self.inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.requests: RequestOwners[Peer] = RequestOwners()
        self._listener = listen(path, backlog=64)
        self._inode = path.stat().st_ino
        threading.Thread(
            target=accept_connections,
            args=(self._listener, self._read, "read"),
            name="accept",
            daemon=True,
        ).start()
        threading.Thread(target=self._watch_fronts, name="watch", daemon=True).start()

    def broadcast(self, frame: Loading | LoadFailed | Welcome) -> None:
        """Send to all peers, and to those that attach later."""
        with self._lock:
            self._greeting = frame
            for peer in self._peers.values():
                peer.send(frame)

    def has_peers(self) -> bool:
        return bool(self._peers)

    def finish(self, timeout: float) -> None:
        """Wait until all peers have what was sent to them, for `timeout` seconds at most."""
        deadline = time.monotonic() + timeout
        with self._lock:
            peers = list(self._peers.values())
        for peer in peers:
            peer.finish(max(0.0, deadline - time.monotonic()))

    def exit(self, status: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            if self._path.lstat().st_ino == self._inode:  # else it is that of a replacement
                self._path.unlink()
        logging.shutdown()
        # Not sys.exit: the main thread may be inside a kernel or a load, which need not finish.
        os._exit(status)

    def _read(self, sock: socket.socket) -> None:
        connection = Connection(sock)
        peer = None
        try:
            hello = connection.receive()
            if not isinstance(hello, Hello) or hello.protocol != PROTOCOL:
                return
            with self._lock:
                peer = Peer(connection, hello, self._next_number)
                self._next_number += 1
                self._peers[peer.number] = peer
                peer.send(self._greeting)
            while (frame := connection.receive()) is not None:
                if isinstance(frame, Delivered):
                    self._pass_on(frame)
                self.inbox.put((peer, frame))
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: no further thread
            # A broken frame costs only its sender the connection.
            logger.warning("a peer was cut off: %s", type(error).__name__)
        finally:
            connection.close()
            if peer is not None:
                with self._lock:
                    del self._peers[peer.number]
                    if peer.role == "front":
                        self._without_front_since = time.monotonic()
                        self._grace = LAST_FRONT_GRACE_S
                peer.close()
                self.inbox.put((peer, PeerClosed()))

    def _pass_on(self, delivered: Delivered) -> None:
        # Forwarded here and not in the loop: a front should not wait for the end of a step.
        by_front: defaultdict[Peer, list[tuple[int, int]]] = defaultdict(list)
        for request_id, position in delivered.progress:
            front = self.requests.find(request_id)
            if front is not None:
                by_front[front].append((request_id, position))
        for front, progress in by_front.items():
            front.send(Delivered(progress))

    def _watch_fronts(self) -> None:
        while True:
            time.sleep(0.25)
            if not self._owner.is_running():
                self._exit_after_owner()
            if self._is_supervised:
                continue
            with self._lock:
                attached = any(peer.role == "front" for peer in self._peers.values())
                alone_for = time.monotonic() - self._without_front_since
            if not attached and alone_for > self._grace:
                logger.info("no front is attached any more: exiting")
                self.exit(0)

    def _exit_after_owner(self) -> None:
        logger.info("the server has exited: exiting")
        pid = self._owner.pid
        try:
            # A supervisor has a janitor from its start on.
            if not self._is_supervised and stubs_left_by(pid):
                janitor.start(folder_of(pid))
        except (OSError, InflightError) as error:
            logger.error("no janitor has started (%s): processes of models may stay", error)
        finally:
            remove_folder_of(pid)
            self.exit(0)


class StatsLog:
    """Logs what an engine does, one line in each interval with work.

    Args:
        engine: whose statistics are logged.
        interval_s: seconds between two lines; 0 logs none.
        clock: seconds, monotonic.
    """

    def __init__(
        self, engine: Engine, interval_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._interval_s = interval_s
        self._clock = clock
        self._last_step = -math.inf
        self._begun = 0.0  # start of the interval, and the statistics then
        self._before: Stats | None = None

    def before_step(self) -> None:
        """Log the interval that has ended, if any. A pause as long as the interval restarts it: a
        rate over idle time would be meaningless."""
        if not self._interval_s:
            return
        now = self._clock()
        is_new = now - self._last_step >= self._interval_s
        self._last_step = now
        if is_new or self._before is None:
            self._begun, self._before = now, self._engine.stats()
        elif now - self._begun >= self._interval_s:
            stats = self._engine.stats()
            self._log(stats, self._before, now - self._begun)
            self._begun, self._before = now, stats

    def _log(self, stats: Stats, before: Stats, seconds: float) -> None:
        prompt = (stats.num_prompt_tokens - before.num_prompt_tokens) / seconds
        output = (stats.num_output_tokens - before.num_output_tokens) / seconds
        in_use = 1.0 - stats.num_free_blocks / stats.num_blocks
        logger.info(
            "running %d, waiting %d, suspended %d; KV blocks in use %.1f%%; "
            "prompt tokens/s %.1f, output tokens/s %.1f",
            stats.num_running,
            stats.num_waiting,
            stats.num_suspended,
            100.0 * in_use,
            prompt,
            output,
        )


class EngineProcess:
    """The loop: commands in, a step, one frame of events per front out.

    Args:
        hub: source of commands and destination of events.
        engine: the engine to run.
        log_stats_interval_s: see `StatsLog`.
        beat: called with the seconds within which it will be called again.
    """

    def __init__(
        self,
        hub: Hub,
        engine: Engine,
        log_stats_interval_s: float = 0.0,
        beat: Callable[[float], None] = lambda patience_s: None,
    ) -> None:
        self._hub = hub
        self._engine = engine
        self._stats_log = StatsLog(engine, log_stats_interval_s)
        self._beat = beat

    def run(self) -> None:
        while True:
            self._beat(IDLE_BEAT_S + BEAT_PATIENCE_S)
            self._take_commands()
            # Right after the acknowledgements that arrived during the last step.
            self._publish(self._engine.sweep())
            if self._engine.has_work:
                self._stats_log.before_step()
                self._publish(self._engine.step())
                if self._engine.is_broken:
                    # The fronts fail their requests and start another engine.
                    raise EngineError("consecutive steps failed: the engine is broken")

    def _take_commands(self) -> None:
        inbox = self._hub.inbox
        if not self._engine.has_work:
            # Suspended requests resume by a command or time out.
            timeout = IDLE_POLL_S if self._engine.has_suspended else IDLE_BEAT_S
            if self._engine.is_compiling or self._engine.is_storing:
                timeout = COMPILING_POLL_S
            with contextlib.suppress(queue.Empty):
                self._apply(*inbox.get(timeout=timeout))
        while not inbox.empty():
            self._apply(*inbox.get())

    def _apply(self, peer: Peer, frame: Frame | PeerClosed) -> None:
        match frame:
            case Submit(request, arrived):
                self._submit(peer, request, arrived)
            case Cancel(request_id):
                self._publish(self._engine.cancel(request_id))
            case Delivered(progress):
                self._engine.delivered(progress)
            case Drain(reason):
                self._engine.drain_reason = reason
            case GetStats():
                peer.send(self._engine.stats())
            case GetMetrics():
                peer.send(self._engine.metrics())
            case Refused(counts):
                self._engine.recorder.refused_by_front(counts)
            case PeerClosed():
                for request_id in self._hub.requests.requests_of(peer):
                    self._publish(self._engine.cancel(request_id))
            case _:
                logger.warning(
                    "a peer sent a %s frame, which only the engine sends", type(frame).__name__
                )

    def _submit(self, peer: Peer, request: Request, arrived: float | None) -> None:
        requests = self._hub.requests
        try:
            requests.add(peer, (request.request_id, *request.output_ids))
        except EngineError as error:  # the request of that id goes on
            peer.send(StepEvents([TokenEvent.failed(request.request_id, error)]))
            return
        try:
            self._engine.submit(request, arrived)
        except InflightError as error:
            self._publish([TokenEvent.failed(request.request_id, error)])

    def _publish(self, events: list[TokenEvent]) -> None:
        requests = self._hub.requests
        by_front: defaultdict[Peer, list[TokenEvent]] = defaultdict(list)
        for event in events:
            front = requests.find(event.request_id)
            if front is not None:
                by_front[front].append(event)
                if event.is_last:
                    requests.ended(event)
        for front, its_events in by_front.items():
            front.send(StepEvents(its_events))


@contextlib.contextmanager
def reserved(
    gpu: Gpu, model: str, num_bytes: int, progress: Callable[[str, float], None]
) -> Iterator[Reservation]:
    """Reserve this process's budget on a GPU; see `GpuLedger.reserve`."""
    this = Process.find(os.getpid())
    assert this is not None

    def wait(models: list[str]) -> None:
        progress(f"waiting for {', '.join(models) or 'GPU memory'}", 0.06)

    with GpuLedger(gpu_folder(), gpu).reserve(model, num_bytes, this, wait) as reservation:
        yield reservation


def load(
    config: settings.EngineConfig,
    name: str,
    progress: Callable[[str, float], None],
    on_launch: Callable[[float], None],
    quarantine: Quarantine,
) -> tuple[Engine, Welcome]:
    """Build the engine.

    Args:
        config: its settings.
        name: of the model in its repository.
        progress: called with what is loading and the loaded fraction, in [0, 1].
        on_launch, quarantine: see `Engine`.

    Raises:
        ConfigError: the checkpoint or a setting is not supported, or other engines have reserved
            the GPU's memory.
    """
    # Imported here: torch takes seconds, and peers should see progress before.
    progress("importing torch", 0.02)
    from inflight.execution import factory as runners
    from inflight.text.tokenizer import Tokenizer

    checkpoint = locate(config.model)
    progress("reading the tokenizer", 0.05)
    tokenizer = Tokenizer.load_if_present(checkpoint)
    config, where = runners.resolve_device(config, checkpoint)
    logger.info("device: %s", where)
    gpu = runners.gpu_of(config)
    if gpu is None:
        runner, model_config = runners.build(config, checkpoint, progress)
    else:
        expected = runners.expected_budget_bytes(config, checkpoint, gpu.total_bytes)
        with reserved(gpu, f"{name} ({checkpoint.name})", expected, progress) as reservation:
            runner, model_config = runners.build(config, checkpoint, progress)
            reservation.settle(runner.gpu_budget_bytes)
    max_model_len = model_config.max_model_len(config)
    # Some GGUF files name only the end of text, while their chat template ends turns with another.
    ends = {*model_config.eos_token_ids, *(tokenizer.eos_ids if tokenizer else ())}
    engine = Engine(
        *(config, runner, max_model_len, ends, tokenizer),
        on_launch=on_launch,
        quarantine=quarantine,
        watts=_power_meter(config.device),
    )
    return engine, Welcome(
        model_name=checkpoint.name,
        vocab_size=runner.vocab_size,
        max_model_len=max_model_len,
        num_blocks=runner.num_blocks,
        block_size=runner.block_size,
        eos_token_ids=sorted(engine.eos_token_ids),
        default_max_tokens=config.default_max_tokens,
        has_tokenizer=tokenizer is not None,
        device=where,
        special_tokens={text: id_ for id_, text in tokenizer.special_ids.items()}
        if tokenizer
        else {},
    )


def _power_meter(device: str) -> Callable[[], float | None]:
    """Start reading the GPU's power; returns the power now, None if it is not known."""
    gpu = power.find_gpu() if device == "cuda" else None
    if gpu is None:
        return lambda: None
    meter = power.PowerMeter(gpu)
    meter.start()
    return meter.watts


def main(arguments: list[str]) -> None:
    path, config_path = Path(arguments[0]), Path(arguments[1])
    owner = Owner(int(arguments[2]), is_supervisor=arguments[3] == "supervisor")
    log.begin()
    limit_spinning()
    # Ctrl-C in a terminal reaches the whole process group; this process exits with its owner.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if owner.is_supervisor:
        end_with(owner.pid)
    process = Process.find(owner.pid)
    if process is None:
        sys.exit("the server has exited")
    hub = Hub(path, process, is_supervised=owner.is_supervisor)
    signal.signal(signal.SIGTERM, lambda *_: hub.exit(0))
    heartbeat = Heartbeat(heartbeat_path(path))
    patience_s = STARTING_PATIENCE_S

    def progress(what: str, fraction: float) -> None:
        heartbeat.beat(patience_s)  # a large model takes longer than that in all
        hub.broadcast(Loading(what, fraction))

    progress("starting", 0.0)
    report = CrashReport(path.with_suffix(".crash"))
    report.log(logger)
    quarantine = Quarantine(path, has_crashed=bool(report.former))
    started = time.monotonic()
    try:
        config = settings.load(config_path)
        patience_s = config.load_timeout_s
        engine, welcome = load(
            config,
            config_path.parent.parent.name,
            progress,
            lambda s: heartbeat.beat(s + BEAT_PATIENCE_S),
            quarantine,
        )
    except InflightError as error:
        logger.error("cannot load: %s", error)
        hub.broadcast(LoadFailed(error.kind, str(error)))
        return _linger_and_exit(hub)
    except Exception as error:
        logger.exception("cannot load")
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        text = f"the engine could not start ({reason}); see its log"
        hub.broadcast(LoadFailed(EngineError.kind, text))
        return _linger_and_exit(hub)
    gc.collect()
    gc.freeze()  # permanent objects: exclude them from garbage collection
    return_freed_memory()
    hub.broadcast(welcome)
    logger.info("ready after %.1f s: %s", time.monotonic() - started, _described(welcome))
    try:
        EngineProcess(hub, engine, engine.config.log_stats_interval_s, heartbeat.beat).run()
    except BaseException as error:  # logged, and the process exits: without its loop it would hang
        logger.exception("the engine loop ended")
        report.write(error)
        hub.finish(LAST_EVENTS_S)
        hub.exit(1)


def _described(welcome: Welcome) -> str:
    shown = msgspec.structs.asdict(welcome)
    del shown["special_tokens"]  # may be a thousand
    return ", ".join(f"{name} {value}" for name, value in shown.items())


def _linger_and_exit(hub: Hub) -> None:
    # Long enough for an attaching front to read the reason.
    deadline = time.monotonic() + LAST_FRONT_GRACE_S
    time.sleep(0.2)
    while hub.has_peers() and time.monotonic() < deadline:
        time.sleep(0.05)
    hub.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
