"""The sandbox from the engine's side: a child process that test-compiles guides and may die."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

import msgspec

from inflight.core.output_constraint import StructuredOutput
from inflight.errors import EngineError
from inflight.structured.grammar import MAX_SOURCE_BYTES, Verdict
from inflight.structured.sandbox_process import HEADER_BYTES, Ready, Setup, write_frame
from inflight.structured.vocabulary import Vocabulary

TIME_LIMIT_S = 1.0
MEMORY_LIMIT = 512 << 20

_START_S = 30.0
_MAX_FRAME_BYTES = 2 * MAX_SOURCE_BYTES  # the other side is not trusted
_GRACE_S = 1.0  # for the process to notice what its fork did


class SandboxLost(Exception):
    """The process died, or hung and was killed."""


class Sandbox:
    """One child process, started on first use and restarted whenever it dies.

    Not thread-safe, except `kill`.

    Args:
        vocabulary: of the model.
        time_limit_s: for each guide.
        memory_limit: bytes that compiling one may take.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        time_limit_s: float = TIME_LIMIT_S,
        memory_limit: int = MEMORY_LIMIT,
    ) -> None:
        self._setup = Setup(vocabulary, time_limit_s, memory_limit)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Of the process, if one runs; it leads a process group that its forks are in."""
        process = self._process
        return None if process is None else process.pid

    def start(self) -> None:
        """Start the process unless it runs.

        Raises:
            EngineError: it does not start.
        """
        if self._process is not None and self._process.poll() is None:
            return
        self._forget()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "inflight.structured.sandbox_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            # Each malloc arena would reserve 64 MiB of address space, which is what is limited.
            env={**os.environ, "MALLOC_ARENA_MAX": "1"},
        )
        try:
            self._send(self._setup)
            msgspec.msgpack.decode(self._receive(_START_S), type=Ready)
        except SandboxLost:
            raise EngineError("the grammar compiler process does not start") from None

    def examine(self, constraint: StructuredOutput) -> Verdict:
        """Test-compile a guide; takes at most the time limit once the process runs.

        Raises:
            SandboxLost: the process died or hung; the next call starts another one.
            EngineError: the process does not start.
        """
        self.start()
        self._send(constraint)
        frame = self._receive(self._setup.time_limit_s + _GRACE_S)
        return msgspec.msgpack.decode(frame, type=Verdict)

    def kill(self) -> None:
        """Kill the process and its fork."""
        pid = self.pid
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self._forget()

    def _forget(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
            process.stdout.close()
            process.wait()

    def _lose(self) -> SandboxLost:
        self.kill()
        self._forget()
        return SandboxLost()

    def _send(self, frame: msgspec.Struct) -> None:
        assert self._process is not None and self._process.stdin is not None
        try:
            write_frame(self._process.stdin.fileno(), frame)
        except OSError:
            raise self._lose() from None

    def _receive(self, timeout_s: float) -> bytes:
        assert self._process is not None and self._process.stdout is not None
        fd = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        poll = select.poll()  # not select, which knows no file descriptors beyond 1023
        poll.register(fd, select.POLLIN)
        data = b""
        while True:
            size = int.from_bytes(data[:HEADER_BYTES], "big")
            if size > _MAX_FRAME_BYTES:
                raise self._lose()
            if len(data) >= HEADER_BYTES and len(data) >= HEADER_BYTES + size:
                return data[HEADER_BYTES : HEADER_BYTES + size]
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(left * 1e3):
                raise self._lose()
            part = os.read(fd, 1 << 20)
            if not part:
                raise self._lose()
            data += part
