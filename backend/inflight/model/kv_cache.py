"""The pool of KV blocks: one allocation for all layers."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from inflight.errors import ConfigError
from inflight.model.config import ModelConfig

_NUMPY_DTYPES = {torch.float32: np.float32, torch.bfloat16: np.uint16}


class KVCache:
    """Keys and values of all layers, in blocks.

    Attributes:
        data: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim]; keys, then values.
        layers: (keys, values) of each layer, views into data.
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype
    ) -> None:
        """Raises ConfigError when there is not that much address space."""
        shape = (
            config.num_layers,
            2,
            num_blocks,
            block_size,
            config.num_kv_heads,
            config.head_dim,
        )
        try:
            # Zeroed lazily by the system: a block costs memory once a sequence writes to it.
            # torch.zeros would touch all of it here.
            zeros = np.zeros(shape, _NUMPY_DTYPES[dtype])
        except (MemoryError, ValueError):
            raise ConfigError(
                f"num_blocks: no memory for {num_blocks} KV blocks; lower num_blocks or "
                "kv_cache_bytes"
            ) from None
        self.data: Tensor = torch.from_numpy(zeros).view(dtype)
        self.layers: list[tuple[Tensor, Tensor]] = [(pair[0], pair[1]) for pair in self.data]
