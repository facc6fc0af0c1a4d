"""Blocks of the KV pool as the kernels see them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KernelBlocks:
    """How each block of a pool is split into the blocks of the kernels, of block_size tokens.

    Attributes:
        count: kernel blocks in a block.
        stride: between the ids of consecutive ones: the number of blocks in the pool.
    """

    count: int = 1
    stride: int = 0

    def ids(self, blocks: list[int]) -> list[int]:
        """Ids of the kernel blocks of a block table, in the order of its tokens."""
        if self.count == 1:
            return blocks
        offsets = range(0, self.count * self.stride, self.stride)
        return [block + offset for block in blocks for offset in offsets]

    def id_at(self, blocks: list[int], index: int) -> int:
        """The id of one of them, counted from the first token on."""
        return blocks[index // self.count] + index % self.count * self.stride
