"""The pool of KV blocks: one allocation for all layers."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from inflight.errors import ConfigError
from inflight.models.config import ModelConfig

_NUMPY_DTYPES = {torch.float32: np.float32, torch.bfloat16: np.uint16}
_Shape = tuple[int, ...]


class KVCache:
    """Keys and values of all layers, in blocks.

    Attributes:
        data: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim]; keys, then values.
        layers: (keys, values) of each layer, views into data.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        """On the CPU without a device.

        Raises:
            ConfigError: there is not that much memory.
        """
        shape = (
            config.num_layers,
            2,
            num_blocks,
            block_size,
            config.num_kv_heads,
            config.head_dim,
        )
        try:
            if device is None:
                self.data = _lazy_zeros(shape, dtype)
            else:
                self.data = torch.zeros(shape, dtype=dtype, device=device)
        except (MemoryError, ValueError, torch.OutOfMemoryError):
            raise ConfigError(
                f"num_blocks: no memory for {num_blocks} KV blocks; lower num_blocks or "
                "kv_cache_memory_bytes"
            ) from None
        self.layers: list[tuple[Tensor, Tensor]] = [(pair[0], pair[1]) for pair in self.data]


def _lazy_zeros(shape: _Shape, dtype: torch.dtype) -> Tensor:
    """Zeroed by the system when first touched: a block costs memory once it is written to."""
    return torch.from_numpy(np.zeros(shape, _NUMPY_DTYPES[dtype])).view(dtype)
