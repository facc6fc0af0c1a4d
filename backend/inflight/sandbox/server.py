"""A sandbox's process: reads its setup and then jobs, and runs each in a worker.

A worker is a fork, so it is warm: libraries are loaded and the setup is done. This process itself
does no job, so it survives them all. Frames are on stdin and stdout; it ends when stdin does.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable

import msgspec

from inflight.sandbox import frames
from inflight.sandbox.messages import Answer, Died, Setup
from inflight.sandbox.worker import Work, Worker


def serve(prepare: Callable[[bytes], Work], *, keeps_workers: bool) -> None:
    """Serve the owner of this process until it is gone.

    Args:
        prepare: from the owner's setup to what a worker does with a job.
        keeps_workers: whether a worker does one job after another, until it dies of one, or each
            job gets a worker of its own.
    """
    stdin, stdout = _claim_standard_streams()
    frame = frames.read(stdin)
    if frame is None:
        return
    setup = msgspec.msgpack.decode(frame, type=Setup)
    work = prepare(setup.body)
    # A collection in a worker would touch, and so copy, all memory shared with this process.
    gc.collect()
    gc.freeze()
    gc.disable()
    frames.write(stdout, b"")
    worker: Worker | None = None
    while (job := frames.read(stdin)) is not None:
        try:
            worker = worker or Worker(work, setup.limits)
        except OSError as error:  # the owner starts this process again
            sys.exit(f"the system refuses a process ({error.strerror})")
        answer: Answer = worker.run(job)
        if isinstance(answer, Died):
            worker = None
        elif not keeps_workers:
            worker.close()
            worker = None
        frames.write(stdout, msgspec.msgpack.encode(answer))


def _claim_standard_streams() -> tuple[int, int]:
    """The pipes from and to the owner; stdin is empty and stdout is stderr for everything else."""
    stdin, stdout = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    try:  # prefer this process as the OOM killer's victim
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")
    except OSError:
        pass
    return stdin, stdout
