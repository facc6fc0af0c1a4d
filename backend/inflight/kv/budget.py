"""Size of the KV block pool."""

from __future__ import annotations

from inflight.config import EngineConfig
from inflight.errors import ConfigError

DEFAULT_KV_BYTES = 1 << 30
"""Default pool size on a CPU."""


def num_kv_blocks(
    config: EngineConfig, block_bytes: int, free_bytes: int = DEFAULT_KV_BYTES
) -> int:
    """KV blocks in the pool of an engine.

    Args:
        config: the engine's settings; num_blocks and kv_cache_memory_bytes override free_bytes.
        block_bytes: bytes of one block, including a drafter's own KV for it.
        free_bytes: memory for the pool if the settings leave it open.

    Raises:
        ConfigError: not even one block fits.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    given = config.kv_cache_memory_bytes
    pool_bytes = free_bytes if given is None else given
    if pool_bytes < block_bytes:
        key = "gpu_memory" if given is None else "kv_cache_memory_bytes"
        raise ConfigError(
            f"{key}: {max(0, pool_bytes)} bytes are not enough for the KV cache; one block of "
            f"this model takes {block_bytes} bytes"
        )
    return pool_bytes // block_bytes
