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
    """Keys and values of all layers, in blocks. Blocks have the same ids in each group.

    Attributes:
        data: the allocations, each [..., num_blocks, block_size, num_kv_heads, dim]: per group
            [layers, 2, ...], keys then values; if keys and values differ in width, [layers, ...]
            for the keys and another for the values.
        layers: (keys, values) of each layer, [num_blocks, block_size, num_kv_heads, dim]; views
            into data.
        block_size: tokens per block.
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
        found: dict[int, tuple[Tensor, Tensor]] = {}
        try:
            for group in layout.groups:
                found |= self._allocate(group, (num_blocks, block_size), device)
        except (MemoryError, ValueError, torch.OutOfMemoryError):
            raise ConfigError(
                f"num_blocks: out of memory for {num_blocks} KV blocks; lower num_blocks or "
                "kv_cache_memory_bytes"
            ) from None
        self.layers = [found[index] for index in range(layout.num_layers)]

    def _allocate(
        self, group: KVGroup, slots: _Shape, device: torch.device | None
    ) -> dict[int, tuple[Tensor, Tensor]]:
        def zeros(*shape: int) -> Tensor:
            if device is None:
                return _lazy_zeros(shape, self.dtype)
            return torch.zeros(shape, dtype=self.dtype, device=device)

        layers, heads = len(group.layers), group.num_kv_heads
        if group.k_dim == group.v_dim:
            pairs = zeros(layers, 2, *slots, heads, group.k_dim)
            self.data.append(pairs)
            return {
                layer: (pair[0], pair[1]) for layer, pair in zip(group.layers, pairs, strict=True)
            }
        keys = zeros(layers, *slots, heads, group.k_dim)
        values = zeros(layers, *slots, heads, group.v_dim)
        self.data += [keys, values]
        return dict(zip(group.layers, zip(keys, values, strict=True), strict=True))


def _lazy_zeros(shape: _Shape, dtype: torch.dtype) -> Tensor:
    """Zero pages, mapped lazily by the OS: a block takes memory once it is written to."""
    return torch.from_numpy(np.zeros(shape, _NUMPY_DTYPES[dtype])).view(dtype)
