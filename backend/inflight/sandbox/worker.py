"""A fork that runs jobs under limits. A crash or a crossed limit ends the fork alone."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import time
from collections.abc import Callable

from inflight.sandbox import frames
from inflight.sandbox.messages import Answer, Cause, Died, Done, Limits

Work = Callable[[bytes], bytes]
"""A worker's work: from a job to its answer. It may raise MemoryError only."""

MAX_ANSWER_BYTES = 64 << 20


def allow_cpu(seconds: float) -> None:
    """Limit the further CPU time of this process; 0: no limit.

    A default action of the kernel, so that no code, in whatever language, can hold it up.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)


class Worker:
    """Forks this process, which must have one thread only.

    Args:
        work: what to do with a job, in the fork.
        limits: of the fork and of each job.
    """

    def __init__(self, work: Work, limits: Limits) -> None:
        self._limits = limits
        jobs, self._jobs = os.pipe()
        self._answers, answers = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                _confine(limits, jobs, answers)
                _work_off(work, limits, jobs, answers)
            finally:
                os._exit(1)
        os.close(jobs)
        os.close(answers)
        os.set_blocking(self._jobs, False)

    def run(self, job: bytes) -> Answer:
        """Run a job. After `Died`, the worker has exited."""
        deadline = time.monotonic() + self._limits.wall_s
        try:
            frames.write(self._jobs, job, deadline)
            return Done(frames.read_within(self._answers, deadline, MAX_ANSWER_BYTES))
        except TimeoutError:
            self.close()
            return Died("time")
        except (OSError, EOFError):
            return Died(_cause(self._wait()))

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        self._wait()

    def _wait(self) -> int:
        os.close(self._jobs)
        os.close(self._answers)
        return os.waitpid(self._pid, 0)[1]


def _confine(limits: Limits, jobs: int, answers: int) -> None:
    """Apply the limits to this process, which keeps two files."""
    with open("/proc/self/statm") as sizes:
        used = int(sizes.read().split()[0]) * resource.getpagesize()
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # a crash may print untrusted text
        os.dup2(null, stream)
    low, high = sorted((jobs, answers))
    os.closerange(3, low)
    os.closerange(low + 1, high)
    os.closerange(high + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (used + limits.memory, used + limits.memory))
    if limits.is_closed:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))


def _work_off(work: Work, limits: Limits, jobs: int, answers: int) -> None:
    gc.enable()
    while (job := frames.read(jobs)) is not None:
        allow_cpu(limits.cpu_s)
        try:
            answer = work(job)
        except MemoryError:
            return
        allow_cpu(0)
        frames.write(answers, answer)


def _cause(status: int) -> Cause:
    signal_ = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if signal_ in (signal.SIGPROF, signal.SIGXCPU):
        return "time"
    return "stack" if signal_ == signal.SIGSEGV else "memory"
