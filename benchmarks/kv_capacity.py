"""How many sequences a KV cache holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from inflight.kv.layout import KVGroup, KVLayout


@dataclass(frozen=True, slots=True)
class KVCapacity:
    """A pool of KV blocks.

    Attributes:
        layout: keys and values of the model.
        num_blocks: of the pool.
        block_size: tokens of a block.
    """

    layout: KVLayout
    num_blocks: int
    block_size: int

    @property
    def bytes_per_token(self) -> int:
        return self.layout.block_bytes(1)

    @property
    def has_windows(self) -> bool:
        return any(group.window for group in self.layout.groups)

    def sequences(self, num_tokens: int) -> int:
        """Sequences of so many tokens, all of whose blocks are kept, as the engine does."""
        return self.num_blocks // self._num_blocks(num_tokens)

    def sequences_if_freed(self, num_tokens: int) -> int:
        """Sequences if blocks of layers with a window were freed once outside it.

        Arithmetic only: the engine does not free them.
        """
        pool_bytes = self.num_blocks * self.layout.block_bytes(self.block_size)
        return pool_bytes // sum(
            self._group_bytes(group, num_tokens) for group in self.layout.groups
        )

    def report(self, num_tokens: int) -> dict[str, Any]:
        """Fields of a result."""
        found: dict[str, Any] = {
            "bytes_per_token": self.bytes_per_token,
            "sequence_tokens": num_tokens,
            "sequences": self.sequences(num_tokens),
        }
        if self.has_windows:
            freed = self.sequences_if_freed(num_tokens)
            found["not_implemented"] = {"sequences_if_windows_were_freed": freed}
        return found

    def line(self, num_tokens: int) -> str:
        """The same in words."""
        text = (
            f"KV cache: {self.sequences(num_tokens):,} sequences of {num_tokens:,} tokens, "
            f"{self.bytes_per_token:,} bytes per token"
        )
        if self.has_windows:
            freed = self.sequences_if_freed(num_tokens)
            text += f"; {freed:,} if blocks outside windows were freed (not implemented)"
        return text

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _group_bytes(self, group: KVGroup, num_tokens: int) -> int:
        num_blocks = self._num_blocks(num_tokens)
        if group.window:  # may begin and end within a block
            num_blocks = min(num_blocks, self._num_blocks(group.window) + 1)
        block_bytes = KVLayout((group,), self.layout.dtype).block_bytes(self.block_size)
        return num_blocks * block_bytes
