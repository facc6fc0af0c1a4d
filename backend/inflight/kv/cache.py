"""KV cache memory: one allocation for each group of layers of one shape."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from inflight.errors import ConfigError
from inflight.kv.layout import KVGroup, KVLayout

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_NUMPY_DTYPES = {torch.float32: np.float32, torch.bfloat16: np.uint16}
_Shape = tuple[int, ...]


class KVCache:
    """Keys and values of all layers, in blocks.

    With one block table per sequence, blocks are those of the kernels, and have the same ids in
    each group. With several (see `kv.layout`), the layers of each table take the same memory: layer
    i of a table with c kernel blocks in a block has slots i * c to (i + 1) * c of each block, so
    that kernel block k of block b has the id k * num_blocks + b.

    Attributes:
        data: the allocations, each [..., num_blocks, block_size, num_kv_heads, dim]: per group
            [layers, 2, ...], keys then values; if keys and values differ in width, [layers, ...]
            for the keys and another for the values. With several tables one for the keys and one
            for the values of all layers, [slots, ...].
        layers: (keys, values) of each layer, [num_kernel_blocks, block_size, num_kv_heads, dim];
            views into data.
        table_of: by layer, the index of its block table.
        views: by table, the memory of its layers, each [..., num_kernel_blocks, block_size,
            num_kv_heads, dim]; views into data.
        kernel_blocks: by table, how its blocks are split.
        block_size: tokens per kernel block.
        dtype: of keys and values.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        block_size: int,
        device: torch.device | None = None,
    ) -> None:
        """On the CPU if device is None.

        Raises:
            ConfigError: out of memory.
        """
        self.block_size = block_size
        self.dtype = _DTYPES[layout.dtype]
        self.data: list[Tensor] = []
        self.kernel_blocks = layout.kernel_blocks(num_blocks)
        self.table_of = [0] * layout.num_layers
        found: dict[int, tuple[Tensor, Tensor]] = {}
        try:
            if layout.is_shared:
                self.views = []
                found = self._share(layout, (num_blocks, block_size), device)
            else:
                for group in layout.groups:
                    found |= self._allocate(group, (num_blocks, block_size), device)
                self.views = [self.data]
        except (MemoryError, ValueError, torch.OutOfMemoryError):
            raise ConfigError(
                f"num_blocks: out of memory for {num_blocks} KV blocks; lower num_blocks or "
                "kv_cache_memory_bytes"
            ) from None
        self.layers = [found[index] for index in range(layout.num_layers)]

    def _zeros(self, shape: _Shape, device: torch.device | None) -> Tensor:
        if device is None:
            return _lazy_zeros(shape, self.dtype)
        return torch.zeros(shape, dtype=self.dtype, device=device)

    def _allocate(
        self, group: KVGroup, blocks: _Shape, device: torch.device | None
    ) -> dict[int, tuple[Tensor, Tensor]]:
        layers, heads = len(group.layers), group.num_kv_heads
        if group.k_dim == group.v_dim:
            pairs = self._zeros((layers, 2, *blocks, heads, group.k_dim), device)
            self.data.append(pairs)
            return {
                layer: (pair[0], pair[1]) for layer, pair in zip(group.layers, pairs, strict=True)
            }
        keys = self._zeros((layers, *blocks, heads, group.k_dim), device)
        values = self._zeros((layers, *blocks, heads, group.v_dim), device)
        self.data += [keys, values]
        return dict(zip(group.layers, zip(keys, values, strict=True), strict=True))

    def _share(
        self, layout: KVLayout, blocks: _Shape, device: torch.device | None
    ) -> dict[int, tuple[Tensor, Tensor]]:
        """Allocate slots that the layers of all tables use; groups do not differ in shape."""
        group = layout.groups[0]
        widths = ((group.num_kv_heads, width) for width in (group.k_dim, group.v_dim))
        self.data = [self._zeros((layout.num_slots, *blocks, *width), device) for width in widths]
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for index, table in enumerate(layout.tables):
            # [layers, kernel blocks, ...]: the slots of a layer are adjacent.
            num_kernel_blocks = table.kernel_blocks * blocks[0]
            keys, values = (
                data[: table.num_slots].view(-1, num_kernel_blocks, *data.shape[2:])
                for data in self.data
            )
            self.views.append([keys, values])
            for layer, pair in zip(table.layers, zip(keys, values, strict=True), strict=True):
                self.table_of[layer] = index
                found[layer] = pair
        return found


def _lazy_zeros(shape: _Shape, dtype: torch.dtype) -> Tensor:
    """Zero pages, mapped lazily by the OS: a block takes memory once it is written to."""
    return torch.from_numpy(np.zeros(shape, _NUMPY_DTYPES[dtype])).view(dtype)
