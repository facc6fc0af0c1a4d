"""The gRPC door: a guard in front of a private Triton.

    python -m inflight.door.grpc_door --listen HOST:PORT --upstream HOST:PORT --health FILE

This process holds the port and runs workers that share it; it starts another one for each that
ends. It prints one line, `listening HOST:PORT`, when all of them accept connections. SIGTERM stops
accepting, lets requests in flight finish for `--drain` seconds, and exits with 0.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from inflight import log
from inflight.door.grpc.settings import Settings, counts_of, heartbeat_of, parse
from inflight.errors import CapacityError, ConfigError
from inflight.ipc.heartbeat import PATIENCE_S, Heartbeat, Lateness
from inflight.ipc.processes import end_with
from inflight.sandbox.process import start_process

START_TIMEOUT_S = 20.0
# After `drain_s`, a worker flushes statuses and exits.
EXIT_S = 4.0
# A worker that ends soon after its start is not started again at once.
RESTART_PAUSE_S = 1.0
_SIGNALS = {signal.SIGTERM, signal.SIGCHLD}

logger = logging.getLogger(__name__)


def reserve(settings: Settings) -> tuple[socket.socket, Settings]:
    """Hold the port for the workers; port 0 becomes a free one.

    The socket does not listen, so the kernel gives it no connections.

    Raises:
        ConfigError: the port is in use.
    """
    host, port = settings.address()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # The supervisor may hold it, too (see HeldPorts).
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((host, port))
    except OSError as error:
        held.close()
        raise ConfigError(f"--listen: {settings.listen}: {error.strerror}") from None
    port = held.getsockname()[1]
    name = f"[{host}]" if ":" in host else host
    return held, msgspec.structs.replace(settings, listen=f"{name}:{port}")


class Workers:
    """The processes that serve."""

    def __init__(self, settings: Settings) -> None:
        self._settings = msgspec.structs.replace(settings, parent=os.getpid())
        self._drain_s = settings.drain_s
        self._heartbeat = settings.heartbeat
        self._lateness = Lateness()
        self._started_at = time.monotonic()
        self._processes = [self._start(index) for index in range(settings.workers)]

    def wait_ready(self) -> None:
        """Wait until each accepts connections.

        Raises:
            ConfigError: one did not start; it has printed why.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        for worker in self._processes:
            assert worker.stdout is not None
            remaining = max(0.0, deadline - time.monotonic())
            readable, _, _ = select.select([worker.stdout], [], [], remaining)
            if not readable or not worker.stdout.readline():
                raise ConfigError("a worker of the gRPC door did not start")

    def restart(self) -> None:
        """Start another one for each that has ended or hangs."""
        for index, worker in enumerate(self._processes):
            if self._heartbeat and self._lateness.of(heartbeat_of(self._heartbeat, worker.pid)):
                worker.kill()
                worker.wait()
            if worker.poll() is None:
                continue
            logger.error("a worker ended with status %d; another one starts", worker.returncode)
            _close(worker)
            pause = self._started_at + RESTART_PAUSE_S - time.monotonic()
            if pause > 0:
                time.sleep(pause)
            self._started_at = time.monotonic()
            try:
                self._processes[index] = self._start(index)
            except CapacityError as error:  # the others serve; it is tried again
                logger.error("a worker cannot be started: %s", error)

    def stop(self) -> None:
        """Drain all of them, and end those that do not."""
        for worker in self._processes:
            worker.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + self._drain_s + EXIT_S
        for worker in self._processes:
            try:
                worker.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
            _close(worker)

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        settings = self._settings
        if settings.counts:
            settings = msgspec.structs.replace(settings, counts=counts_of(settings.counts, index))
        return start_process(
            [
                *(sys.executable, "-m", "inflight.door.grpc.worker"),
                msgspec.json.encode(settings).decode(),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )


def _close(worker: subprocess.Popen[bytes]) -> None:
    if worker.stdout is not None:
        worker.stdout.close()


def run(settings: Settings) -> None:
    """Serve until SIGTERM.

    Raises:
        ConfigError: the port is in use, or a worker did not start.
        CapacityError: see `start_process`.
    """
    # Waited for with sigtimedwait; workers unblock them.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    held, settings = reserve(settings)
    with held:
        workers = Workers(settings)
        try:
            workers.wait_ready()
            print(f"listening {settings.listen}", flush=True)
            heartbeat = Heartbeat(Path(settings.heartbeat)) if settings.heartbeat else None
            while True:
                if heartbeat is not None:
                    heartbeat.beat(PATIENCE_S)
                # The timeout is for a SIGCHLD that was merged with another one.
                received = signal.sigtimedwait(_SIGNALS, 1.0)
                if received is not None and received.si_signo == signal.SIGTERM:
                    return
                workers.restart()
        finally:
            workers.stop()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        log.begin()
        options = parse()
        end_with(options.parent)
        run(options)
    except (ConfigError, CapacityError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
