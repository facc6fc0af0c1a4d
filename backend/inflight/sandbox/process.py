"""A sandbox from its owner's side: a child process whose jobs may kill it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from inflight.errors import CapacityError, EngineError
from inflight.sandbox import frames
from inflight.sandbox.messages import Answer, Cause, Died, Limits, Setup

MAX_ANSWER_BYTES = 65 << 20
_START_S = 30.0
_GRACE_S = 1.0  # for the process to report the end of its worker


class SandboxLost(Exception):
    """The process died, or hung and was killed."""


class LimitExceeded(Exception):
    """A job crossed a limit, or crashed: only its worker was lost.

    Args:
        cause: time, memory or stack; a crash counts as memory.
    """

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause)
        self.cause = cause


class SandboxProcess:
    """One child process, started on first use and restarted whenever it dies.

    Not thread-safe, except `kill`.

    Args:
        module: to run; it calls `server.serve`.
        name: for errors, as in "the NAME process does not start".
        limits: of its workers.
        setup: builds what the module's `prepare` gets.
        max_answer_bytes: of an answer; the other side is not trusted.

    Attributes:
        limits: as given.
    """

    def __init__(
        self,
        module: str,
        name: str,
        limits: Limits,
        setup: Callable[[], bytes] = bytes,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        self._module = module
        self._name = name
        self.limits = limits
        self._setup = setup
        self._max_answer_bytes = max_answer_bytes
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Of the process, if one runs; it leads a process group that its workers are in."""
        process = self._process
        return None if process is None else process.pid

    def start(self) -> None:
        """Start the process unless it runs.

        Raises:
            CapacityError: the machine or the user has too many processes, or too little memory.
            EngineError: it does not start.
        """
        if self._process is not None and self._process.poll() is None:
            return
        self._forget()
        setup = msgspec.msgpack.encode(Setup(self.limits, self._setup()))
        self._process = start_process(
            [python_executable(), "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            # Each malloc arena would reserve 64 MiB of address space, which is what is limited; and
            # a process with a pool of threads cannot fork.
            env={**os.environ, "MALLOC_ARENA_MAX": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
        try:
            self._exchange(setup, _START_S)
        except SandboxLost:
            raise EngineError(f"the {self._name} process does not start") from None

    def run(self, job: bytes) -> bytes:
        """Run a job in a worker; takes at most the time limit once the process runs.

        Raises:
            LimitExceeded: the worker died of it.
            SandboxLost: the process died or hung; the next call starts another one.
            EngineError: the process does not start.
        """
        self.start()
        frame = self._exchange(job, self.limits.wall_s + _GRACE_S)
        try:
            answer: Answer = msgspec.msgpack.decode(frame, type=Answer)
        except msgspec.DecodeError:
            raise self._lose() from None
        if isinstance(answer, Died):
            raise LimitExceeded(answer.cause)
        return answer.body

    def kill(self) -> None:
        """Kill the process and its workers."""
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

    def _exchange(self, frame: bytes, timeout_s: float) -> bytes:
        assert self._process is not None
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        deadline = time.monotonic() + timeout_s
        try:
            os.set_blocking(stdin.fileno(), False)
            frames.write(stdin.fileno(), frame, deadline)
            return frames.read_within(stdout.fileno(), deadline, self._max_answer_bytes)
        except (OSError, EOFError):  # a timeout is an OSError
            raise self._lose() from None


def python_executable() -> str:
    """This interpreter as a file; inside Triton's stub `sys.executable` may name the stub."""
    for candidate in (Path(sys.prefix, "bin", "python3"), Path(sys.executable or "python3")):
        if candidate.exists():
            return str(candidate)
    return "python3"


def start_process(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a child process, with options of `subprocess.Popen`.

    Raises:
        CapacityError: the machine or the user has too many processes, or too little memory.
    """
    try:
        process: subprocess.Popen[bytes] = subprocess.Popen(command, **options)
    except OSError as error:
        reason = error.strerror
        raise CapacityError(f"the system refuses a process ({reason}); retry later") from None
    return process
