"""The messages between a sandbox and its owner."""

from __future__ import annotations

from typing import Literal

import msgspec

Cause = Literal["time", "memory", "stack"]


class Limits(msgspec.Struct, frozen=True):
    """Limits of a worker.

    Attributes:
        cpu_s: CPU time of a job in seconds, unless the job's code allows itself another.
        wall_s: real time of a job in seconds.
        memory: bytes of address space, in addition to that of the sandbox.
        is_closed: whether it can open files and sockets.
    """

    cpu_s: float
    wall_s: float
    memory: int
    is_closed: bool = False


class Setup(msgspec.Struct, frozen=True):
    """The first frame to a sandbox; it is answered by an empty one."""

    limits: Limits
    body: bytes


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The answer of a worker."""

    body: bytes


class Died(msgspec.Struct, frozen=True, tag="died"):
    """The worker died of the job: it crossed a limit, or crashed."""

    cause: Cause


Answer = Done | Died
