"""Loads of KV blocks from host memory, from admission until the sequence's first commit."""

from __future__ import annotations

from typing import NamedTuple

from inflight.core.batch import Load
from inflight.core.sequence import Sequence
from inflight.kv.block_pool import BlockPool
from inflight.kv.tiers.host_cache import HostCache


class _Loading(NamedTuple):
    """A block that is being loaded: its hash, and its id in the pool."""

    key: bytes
    block: int


class HostLoads:
    """Blocks that admitted sequences load instead of computing them.

    A block is registered in the prefix cache only once a step that reads it has been committed: if
    a step fails, no other sequence has found a block that was never filled. Until then its slot in
    host memory is held.

    Args:
        host: where blocks are loaded from.
        pool: where they go.
    """

    def __init__(self, host: HostCache, pool: BlockPool) -> None:
        self.host = host
        self._pool = pool
        self._planned: list[Load] = []
        self._loading: dict[Sequence, list[_Loading]] = {}

    def __len__(self) -> int:
        """Sequences with loads that are not confirmed."""
        return len(self._loading)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._loading

    @property
    def sequences(self) -> list[Sequence]:
        """With loads that are not confirmed."""
        return list(self._loading)

    @property
    def num_planned(self) -> int:
        """Loads of the step that is being planned."""
        return len(self._planned)

    def add(self, sequence: Sequence, key: bytes) -> int:
        """Load a block that is in host memory; returns its new block, of which one must be free."""
        block = self._pool.allocate()
        self._planned.append(Load(self.host.hold(key), block))
        self._loading.setdefault(sequence, []).append(_Loading(key, block))
        return block

    def take_planned(self) -> list[Load]:
        """The loads of the step that has been planned."""
        planned, self._planned = self._planned, []
        return planned

    def confirm(self, sequence: Sequence) -> None:
        """A step that read the blocks of a sequence was committed."""
        for key, block in self._loading.pop(sequence, ()):
            self._pool.register(block, key)
            self.host.release(key)

    def drop(self, sequence: Sequence) -> None:
        """A sequence has lost its blocks."""
        dropped = self._loading.pop(sequence, [])
        for key, _ in dropped:
            self.host.release(key)
        if dropped and self._planned:  # their blocks may be others' before the next step
            blocks = {block for _, block in dropped}
            self._planned = [load for load in self._planned if load.block not in blocks]
