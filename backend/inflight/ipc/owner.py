"""The owner of an engine: the process with which it exits."""

from __future__ import annotations

from dataclasses import dataclass

SUPERVISOR = "INFLIGHT_SUPERVISOR"
"""The environment variable in which `inflight serve` hands its pid down."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that an engine belongs to, and with which it exits.

    Attributes:
        pid: of `inflight serve` or of tritonserver.
        is_supervisor: it starts the engine, and the engine outlives tritonserver.
    """

    pid: int
    is_supervisor: bool
