"""Refuses requests that crash the engine: those that were running at MAX_CRASHES crashes.

All requests of a batch are suspects, as a crash does not show which one caused it. A suspect that
completes is cleared. A replaced engine continues with the files of the one before.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from inflight.core import running_table
from inflight.core.request import Request
from inflight.core.running_table import DIGEST_BYTES, RunningTable
from inflight.errors import QuarantinedError

logger = logging.getLogger(__name__)

MAX_CRASHES = 2
QUARANTINE_S = 600.0
# The least recent ones are forgotten.
MAX_SUSPECTS = 4096

_encoder = msgspec.msgpack.Encoder()


class Suspect(msgspec.Struct, array_like=True):
    """A content that was running at a crash.

    Attributes:
        digest: see `digest_of`.
        num_crashes: since it last completed.
        crashed_at: the last one, in the clock's seconds.
    """

    digest: bytes
    num_crashes: int
    crashed_at: float


def digest_of(request: Request) -> bytes:
    """A digest of a request's content. Ids and the seed differ between attempts at the same."""
    params = request.params
    if params.seed is not None:
        params = msgspec.structs.replace(params, seed=None)
    content = (
        *(request.prompt_ids, params, request.cache_salt),
        *(request.speculation, request.structured),
    )
    return hashlib.blake2b(_encoder.encode(content), digest_size=DIGEST_BYTES).digest()


class Quarantine:
    """The suspects of one model's engine. Called by the engine's loop.

    Args:
        path: of its files, without a suffix; None keeps nothing for the next engine.
        has_crashed: whether the engine before crashed, rather than being stopped or killed.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        has_crashed: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._file = None if path is None else path.with_suffix(".suspects")
        self._suspects = {one.digest: one for one in self._load()}  # the most recent one last
        table = None if path is None else path.with_suffix(".running")
        if table is not None and has_crashed:
            self._suspect(running_table.read(table))
        self._running = RunningTable(table)
        self._failed: set[int] = set()  # requests of failed steps, since a step succeeded

    def check(self, request: Request) -> None:
        """Raises QuarantinedError if the request is quarantined."""
        if not self._suspects:
            return
        suspect = self._suspects.get(digest_of(request))
        if suspect is None or suspect.num_crashes < MAX_CRASHES:
            return
        left_s = suspect.crashed_at + QUARANTINE_S - self._clock()
        if left_s > 0:
            raise QuarantinedError(
                f"the engine crashed {suspect.num_crashes} times while it ran this request, which "
                f"is refused for another {math.ceil(left_s)} s; change the request"
            )

    def started(self, request: Request) -> None:
        """The request is in the running batch."""
        self._running.enter(request.request_id, digest_of(request))

    def completed(self, request_id: int) -> None:
        """The request has ended without an error: its content is cleared."""
        digest = self._running.leave(request_id)
        if digest in self._suspects:
            del self._suspects[digest]
            self._save()

    def ended(self, request_id: int) -> None:
        """The request was cancelled or has failed by itself."""
        if request_id not in self._failed:
            self._running.leave(request_id)

    def step_failed(self, request_ids: set[int]) -> None:
        """A step has failed. Its requests stay in the batch until another step succeeds: after a
        GPU error every step fails, and the engine exits."""
        self._failed |= request_ids

    def step_succeeded(self) -> None:
        if self._failed:
            for request_id in self._failed:
                self._running.leave(request_id)
            self._failed.clear()

    def _suspect(self, digests: set[bytes]) -> None:
        now = self._clock()
        for digest in digests:
            former = self._suspects.pop(digest, None)
            count = 1 if former is None else former.num_crashes + 1
            self._suspects[digest] = Suspect(digest, count, now)
        for digest in list(self._suspects)[:-MAX_SUSPECTS]:
            del self._suspects[digest]
        self._save()
        refused = [one for one in digests if self._suspects[one].num_crashes >= MAX_CRASHES]
        logger.error(
            "contents that were running when the engine crashed: %d; quarantined for %.0f s: %s",
            len(digests),
            QUARANTINE_S,
            ", ".join(sorted(one.hex()[:12] for one in refused)) or "none",
        )

    def _load(self) -> list[Suspect]:
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            if self._file is not None:
                return msgspec.msgpack.decode(self._file.read_bytes(), type=list[Suspect])
        return []

    def _save(self) -> None:
        if self._file is not None:
            self._file.write_bytes(_encoder.encode(list(self._suspects.values())))
