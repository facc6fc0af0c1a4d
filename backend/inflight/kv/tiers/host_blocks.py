"""Memory of KV blocks on the host, and copies between it and a device's pool."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.core.batch import Load, Store
from inflight.errors import ConfigError


@dataclass(frozen=True, slots=True)
class BlockPart:
    """The part of a block that is in one allocation of a cache: equal rows at equal distances.

    Attributes:
        data: the allocation as bytes, [rows, num_blocks, bytes of a row].
        start: its first byte in a slot of host memory.
    """

    data: Tensor
    start: int

    @property
    def num_rows(self) -> int:
        return self.data.shape[0]

    @property
    def row_bytes(self) -> int:
        return self.data.shape[2]

    @property
    def end(self) -> int:
        return self.start + self.num_rows * self.row_bytes


def block_parts(caches: Iterable[Tensor]) -> list[BlockPart]:
    """The parts of a pool's blocks, one after the other in a slot.

    Args:
        caches: [..., num_blocks, block_size, G, D] each, contiguous: of the model's layers, then
            of a drafter.
    """
    parts: list[BlockPart] = []
    end = 0
    for cache in caches:
        rows, num_blocks = math.prod(cache.shape[:-4]), cache.shape[-4]
        if cache.numel():
            parts.append(BlockPart(cache.view(rows, num_blocks, -1).view(torch.uint8), end))
            end = parts[-1].end
    return parts


class HostBlocks:
    """Slots of host memory, each of which holds a block in all layers.

    Args:
        parts: of a block in the pool.
        num_bytes: of memory.

    Attributes:
        memory: [num_slots, bytes of a block] uint8.

    Raises:
        ConfigError: not even one block fits, or there is not that much memory.
    """

    def __init__(self, parts: Sequence[BlockPart], num_bytes: int) -> None:
        self._parts = parts
        block_bytes = parts[-1].end
        if num_bytes < block_bytes:
            raise ConfigError(
                f"kv_host_memory_bytes: {num_bytes} bytes are not enough; one KV block of this "
                f"model takes {block_bytes} bytes"
            )
        try:
            self.memory = torch.empty(num_bytes // block_bytes, block_bytes, dtype=torch.uint8)
        except RuntimeError as error:
            raise ConfigError(
                f"kv_host_memory_bytes: {num_bytes} bytes cannot be allocated; lower it"
            ) from error

    @property
    def num_slots(self) -> int:
        return len(self.memory)

    def load(self, loads: Iterable[Load]) -> None:
        """Copy blocks from slots to the pool of a CPU."""
        for slot, block in loads:
            for part in self._parts:
                part.data[:, block] = self._rows(slot, part)

    def store(self, stores: Iterable[Store]) -> None:
        """Copy blocks from the pool of a CPU to slots."""
        for _, block, slot in stores:
            for part in self._parts:
                self._rows(slot, part).copy_(part.data[:, block])

    def _rows(self, slot: int, part: BlockPart) -> Tensor:
        return self.memory[slot, part.start : part.end].view(part.num_rows, -1)
