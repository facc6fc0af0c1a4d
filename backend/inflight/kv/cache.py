"""KV cache memory: one allocation for each group of layers of one shape."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from inflight.errors import ConfigError
from inflight.kv.layout import KVGroup, KVLayout
from inflight_kernels.torch_ops import kv_quantization, transformer
from inflight_kernels.torch_ops.kv_quantization import SCALE_TYPE, KVMemory

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}
_NUMPY_DTYPES = {torch.float32: np.float32, torch.bfloat16: np.uint16, torch.uint8: np.uint8}
_Shape = tuple[int, ...]
_Pair = tuple[KVMemory, KVMemory]


class KVCache:
    """Keys and values of all layers, in blocks.

    With one block table per sequence, blocks are those of the kernels, and have the same ids in
    each group. With several (see `kv.layout`), the layers of each table take the same memory: layer
    i of a table with c kernel blocks in a block has slots i * c to (i + 1) * c of each block, so
    that kernel block k of block b has the id k * num_blocks + b.

    In 8 bits, blocks are bytes: those of the values, then their scales
    (`torch_ops.kv_quantization`). `dim` below is then two more than the values of a head.

    Attributes:
        data: the allocations, each [..., num_blocks, block_size, num_kv_heads, dim]: per group
            [layers, 2, ...], keys then values; if keys and values differ in width, [layers, ...]
            for the keys and another for the values; none for values that are a part of their keys.
            With several tables one for the keys and one for the values of all layers, [slots, ...].
        layers: (keys, values) of each layer, [num_kernel_blocks, block_size, num_kv_heads,
            values of a head]; views into data. Values that are a part of their keys are views of
            the same memory.
        table_of: by layer, the index of its block table.
        views: by table, the memory of its layers, each [..., num_kernel_blocks, block_size,
            num_kv_heads, dim]; views into data.
        kernel_blocks: by table, how its blocks are split.
        block_size: tokens per kernel block.
        dtype: of keys and values.
        is_quantized: whether they have 8 bits.
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
        self.is_quantized = self.dtype.itemsize == 1
        self.data: list[Tensor] = []
        self.kernel_blocks = layout.kernel_blocks(num_blocks)
        self.table_of = [0] * layout.num_layers
        found: dict[int, _Pair] = {}
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

    def clear_slots(self, table: int, slots: Tensor) -> None:
        """Zero slots [n] of a block table's layers, on the CPU (see `transformer.clear_slots`)."""
        clear = kv_quantization.clear_slots if self.is_quantized else transformer.clear_slots
        for view in self.views[table]:
            clear(view, slots)

    def _zeros(self, shape: _Shape, device: torch.device | None) -> Tensor:
        """Zeros [..., dim] of the cache's type, or the bytes [..., dim + 2] of such blocks."""
        dtype = self.dtype
        if self.is_quantized:
            shape, dtype = (*shape[:-1], shape[-1] + SCALE_TYPE.itemsize), torch.uint8
        if device is None:
            return _lazy_zeros(shape, dtype)
        return torch.zeros(shape, dtype=dtype, device=device)

    def _pair(self, group: KVGroup, parts: Sequence[Tensor]) -> _Pair:
        """Views of a layer's blocks: of keys, and of values if these are apart."""
        keys, *others = map(self._memory, parts)
        if others:
            return keys, others[0]
        return keys, kv_quantization.first_columns(keys, group.shared_dim)

    def _memory(self, blocks: Tensor) -> KVMemory:
        return kv_quantization.of_blocks(blocks, self.dtype) if self.is_quantized else blocks

    def _allocate(
        self, group: KVGroup, blocks: _Shape, device: torch.device | None
    ) -> dict[int, _Pair]:
        layers, heads = len(group.layers), group.num_kv_heads
        parts: Sequence[Tensor]
        if group.k_dim == group.v_dim:
            pairs = self._zeros((layers, 2, *blocks, heads, group.k_dim), device)
            self.data.append(pairs)
            parts = pairs.unbind(1)
        else:
            parts = [self._zeros((layers, *blocks, heads, dim), device) for dim in group.dims]
            self.data += parts
        return {
            layer: self._pair(group, own) for layer, *own in zip(group.layers, *parts, strict=True)
        }

    def _share(
        self, layout: KVLayout, blocks: _Shape, device: torch.device | None
    ) -> dict[int, _Pair]:
        """Allocate slots that the layers of all tables use; groups do not differ in shape."""
        group = layout.groups[0]
        widths = ((group.num_kv_heads, width) for width in group.dims)
        self.data = [self._zeros((layout.num_slots, *blocks, *width), device) for width in widths]
        found: dict[int, _Pair] = {}
        for index, table in enumerate(layout.tables):
            # [layers, kernel blocks, ...]: the slots of a layer are adjacent.
            num_kernel_blocks = table.kernel_blocks * blocks[0]
            parts = [
                data[: table.num_slots].view(-1, num_kernel_blocks, *data.shape[2:])
                for data in self.data
            ]
            self.views.append(parts)
            for layer, *own in zip(table.layers, *parts, strict=True):
                self.table_of[layer] = index
                found[layer] = self._pair(group, own)
        return found


def _lazy_zeros(shape: _Shape, dtype: torch.dtype) -> Tensor:
    """Zero pages, mapped lazily by the OS: a block takes memory once it is written to."""
    return torch.from_numpy(np.zeros(shape, _NUMPY_DTYPES[dtype])).view(dtype)
