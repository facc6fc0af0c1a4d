"""How many KV blocks there is memory for."""

from __future__ import annotations

from inflight.config import EngineConfig
from inflight.errors import ConfigError

DEFAULT_KV_BYTES = 1 << 30
"""Of a pool on a CPU."""


def num_kv_blocks(
    config: EngineConfig, block_bytes: int, free_bytes: int = DEFAULT_KV_BYTES
) -> int:
    """KV blocks in the pool of an engine.

    Args:
        config: the engine's settings; num_blocks and kv_cache_memory_bytes come before free_bytes.
        block_bytes: memory of one block, with what a drafter keeps for it.
        free_bytes: memory for the pool where the settings name none.

    Raises:
        ConfigError: there is no memory for one block.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    given = config.kv_cache_memory_bytes
    pool_bytes = free_bytes if given is None else given
    if pool_bytes < block_bytes:
        key = "gpu_memory" if given is None else "kv_cache_memory_bytes"
        raise ConfigError(
            f"{key}: {max(0, pool_bytes)} bytes for the KV cache are too few; one block of "
            f"this model takes {block_bytes} bytes"
        )
    return pool_bytes // block_bytes
