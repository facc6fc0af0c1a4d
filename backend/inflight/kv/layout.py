"""Layout of the KV cache: the shapes of keys and values by layer, and the tokens that are kept.

Layers with a sliding window need only the last tokens of a sequence. So a sequence has up to two
block tables: one of the layers that attend to all tokens, and one of those with a window, whose
blocks are freed once the window has passed them. Both take blocks from one pool, so a block has the
same bytes in either: with five windowed layers for each other one, a block holds 16 tokens of the
windowed layers, or 80 tokens of the others (compare the hybrid KV cache manager of vLLM, and Jenga,
arXiv:2503.18292). To the kernels the latter are five blocks of 16 tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from inflight.config import KVDtype
from inflight.core.kernel_blocks import KernelBlocks

_ITEM_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "fp8": 1, "int8": 1}

# With 8 bits, a block of keys or values ends with its scales: one per token and head.
_SCALE_BYTES: dict[str, int] = {"fp8": 2, "int8": 2}

TILE_TOKENS = 128
"""Kernels read the keys of a window from a multiple of this on: whole tiles, then mask."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose keys and values have the same shape and attention window.

    Attributes:
        layers: their indices, ascending.
        num_kv_heads: heads of keys and values.
        k_dim, v_dim: elements of a head's key and value; v_dim is 0 if the value is a part of the
            key, as with latent attention.
        window: tokens that a query attends to, its own included; 0 for all previous ones.
        shared_dim: if v_dim is 0, the first elements of a key that are its value.
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    k_dim: int
    v_dim: int
    window: int = 0
    shared_dim: int = 0

    @property
    def dims(self) -> tuple[int, ...]:
        """Elements of each vector that is kept of a head: of its key and, if apart, its value."""
        return (self.k_dim, self.v_dim) if self.v_dim else (self.k_dim,)

    @property
    def token_elements(self) -> int:
        """Of a token's key and value in one layer."""
        return self.num_kv_heads * sum(self.dims)

    def token_bytes(self, dtype: KVDtype) -> int:
        """Bytes of a token's key and value in one layer, scales included."""
        scale = _SCALE_BYTES.get(dtype, 0)
        return self.num_kv_heads * sum(dim * _ITEM_BYTES[dtype] + scale for dim in self.dims)


@dataclass(frozen=True, slots=True)
class KVTable:
    """Layers that share a block table, because they keep the same tokens.

    Attributes:
        layers: their indices, ascending.
        window: tokens that a query attends to, its own included; blocks before them are freed. 0 if
            all are kept.
        kernel_blocks: blocks of the kernels in a block of this table.
        tile_tokens: see `TILE_TOKENS`.
    """

    layers: tuple[int, ...] = ()
    window: int = 0
    kernel_blocks: int = 1
    tile_tokens: int = TILE_TOKENS

    @property
    def num_slots(self) -> int:
        """Kernel blocks of one layer that a block of this table takes."""
        return len(self.layers) * self.kernel_blocks

    def first_kept(self, position: int) -> int:
        """The first token that queries from `position` on may read."""
        if not self.window:
            return 0
        return max(0, position - self.window + 1) // self.tile_tokens * self.tile_tokens


@dataclass(frozen=True, slots=True)
class KVTables:
    """The block tables of each sequence.

    Attributes:
        tables: at least one, at most one of them with a window, and that last. At most one has more
            than one kernel block in a block.
        block_size: tokens of a kernel block.
    """

    tables: tuple[KVTable, ...]
    block_size: int

    @classmethod
    def single(cls, block_size: int) -> KVTables:
        """One table that keeps all tokens, with blocks as those of the kernels."""
        return cls((KVTable(),), block_size)

    @property
    def spans(self) -> tuple[int, ...]:
        """Tokens of a block, by table."""
        return tuple(table.kernel_blocks * self.block_size for table in self.tables)

    @property
    def frees_windows(self) -> bool:
        """Whether blocks of a table are freed once no window reaches them."""
        return any(table.window for table in self.tables)

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks of so many tokens, none of which is freed: those of a sequence when admitted."""
        return sum(-(-num_tokens // span) for span in self.spans)

    def num_kept_blocks(self, num_tokens: int) -> int:
        """Blocks of a sequence of so many tokens that decodes."""
        return sum(
            -(-num_tokens // span) - table.first_kept(num_tokens - 1) // span
            for table, span in zip(self.tables, self.spans, strict=True)
        )

    def max_sequences(self, num_blocks: int, num_tokens: int) -> int:
        """Sequences of so many tokens in a pool: all decode but the one that is admitted last."""
        free = num_blocks - self.num_blocks(num_tokens)
        return 0 if free < 0 else 1 + free // self.num_kept_blocks(num_tokens)

    def max_tokens(self, num_blocks: int) -> int:
        """Tokens of the longest sequence that so many blocks hold when it is admitted."""
        limit = num_blocks * max(self.spans)
        return bisect_right(range(1, limit + 1), num_blocks, key=self.num_blocks)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The KV cache of one model.

    Attributes:
        groups: each layer is in exactly one.
        dtype: of keys and values; `fp8` and `int8` with a scale per vector
            (`torch_ops.kv_quantization`).
        frees_windows: whether blocks are freed once no window reaches them. Where the groups differ
            in shape, they are kept all the same.
    """

    groups: tuple[KVGroup, ...]
    dtype: KVDtype
    frees_windows: bool = False

    @property
    def num_layers(self) -> int:
        return sum(len(group.layers) for group in self.groups)

    @property
    def tables(self) -> tuple[KVTable, ...]:
        """The block tables of a sequence; each layer is in exactly one."""
        windowed = [group for group in self.groups if group.window]
        shapes = {(group.num_kv_heads, group.dims, group.shared_dim) for group in self.groups}
        if not self.frees_windows or not windowed or len(shapes) > 1:
            return (KVTable(tuple(range(self.num_layers))),)
        window = max(group.window for group in windowed)
        sliding = _layers_of(windowed)
        full = _layers_of([group for group in self.groups if not group.window])
        if not full:
            return (KVTable(sliding, window),)
        # The table with fewer layers has longer blocks, so that all have about the same bytes.
        return (
            KVTable(full, 0, max(1, round(len(sliding) / len(full)))),
            KVTable(sliding, window, max(1, round(len(full) / len(sliding)))),
        )

    @property
    def is_shared(self) -> bool:
        """Whether the layers of several tables share the memory of a block."""
        return len(self.tables) > 1

    @property
    def num_slots(self) -> int:
        """Kernel blocks of one layer in a block of the pool."""
        return max(table.num_slots for table in self.tables)

    def kernel_blocks(self, num_blocks: int) -> tuple[KernelBlocks, ...]:
        """By table, how blocks of a pool of so many are split into those of the kernels."""
        return tuple(KernelBlocks(table.kernel_blocks, num_blocks) for table in self.tables)

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block of the pool, with kernel blocks of block_size tokens."""
        if self.is_shared:
            token_bytes = self.num_slots * self.groups[0].token_bytes(self.dtype)
        else:
            token_bytes = sum(
                len(group.layers) * group.token_bytes(self.dtype) for group in self.groups
            )
        return token_bytes * block_size


def _layers_of(groups: Sequence[KVGroup]) -> tuple[int, ...]:
    return tuple(sorted(layer for group in groups for layer in group.layers))
