"""Memory of an engine: the size of its KV block pool, and its budget of a GPU's memory."""

from __future__ import annotations

from inflight.config import EngineConfig
from inflight.errors import ConfigError

DEFAULT_KV_BYTES = 1 << 30
"""Default pool size on a CPU."""

DEFAULT_UTILIZATION = 0.92
"""Of a GPU's memory, as in vLLM. What remains holds the budget of a second, small engine."""

GPU_OVERHEAD_BYTES = 1 << 30
"""Of an engine's budget: the CUDA context, loaded kernels, CUDA graphs, temporaries."""


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
        key = "gpu_memory_utilization" if given is None else "kv_cache_memory_bytes"
        raise ConfigError(
            f"{key}: {max(0, pool_bytes)} bytes are not enough for the KV cache; one block of "
            f"this model takes {block_bytes} bytes"
        )
    return pool_bytes // block_bytes


def gpu_pool_bytes(
    config: EngineConfig, total_bytes: int, weight_bytes: int, block_bytes: int, max_blocks: int
) -> int:
    """Memory that the budget leaves for the KV pool on a GPU; negative if the weights exceed it.

    Args:
        config: the engine's settings.
        total_bytes: of the GPU.
        weight_bytes: of everything allocated before the pool.
        block_bytes: bytes of one block.
        max_blocks: blocks of a sequence, at most.
    """
    share = config.gpu_memory_utilization or DEFAULT_UTILIZATION
    left = int(total_bytes * share) - weight_bytes - GPU_OVERHEAD_BYTES
    if config.gpu_memory_utilization is not None:
        return left
    # More blocks would hold no running sequence, and would keep memory from other engines.
    return min(left, config.max_num_seqs * max_blocks * block_bytes)


def gpu_budget_bytes(
    config: EngineConfig, total_bytes: int, weight_bytes: int, block_bytes: int, max_blocks: int
) -> int:
    """The engine's budget: weights, KV pool and overhead. For the arguments see `gpu_pool_bytes`.

    Raises:
        ConfigError: not even one block fits.
    """
    left = gpu_pool_bytes(config, total_bytes, weight_bytes, block_bytes, max_blocks)
    num_blocks = num_kv_blocks(config, block_bytes, left)
    return weight_bytes + num_blocks * block_bytes + GPU_OVERHEAD_BYTES
