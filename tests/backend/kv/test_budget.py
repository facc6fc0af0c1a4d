"""The pool of KV blocks is as large as its memory allows, and an engine has a budget on a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from inflight.config import EngineConfig
from inflight.errors import ConfigError
from inflight.kv.budget import (
    GPU_OVERHEAD_BYTES,
    gpu_budget_bytes,
    gpu_pool_bytes,
    num_kv_blocks,
)
from inflight.kv.layout import KVGroup, KVLayout

LAYOUT = KVLayout((KVGroup((0, 1), 2, 16, 16),), "float32")
BLOCK_BYTES = 2 * 2 * 2 * 16 * 16 * 4  # k and v, layers, heads, head_dim, tokens, bytes
GPU_BYTES = 80 << 30
WEIGHT_BYTES = 16 << 30
MAX_BLOCKS = 512


def test_a_block_holds_keys_and_values_of_all_layers() -> None:
    assert LAYOUT.block_bytes(16) == BLOCK_BYTES
    assert KVLayout(LAYOUT.groups, "bfloat16").block_bytes(16) == BLOCK_BYTES // 2
    uneven = KVGroup((0,), 1, 576, 512)
    assert KVLayout((uneven,), "bfloat16").block_bytes(16) == (576 + 512) * 16 * 2
    assert KVLayout((uneven,), "fp8").block_bytes(16) == (576 + 2 + 512 + 2) * 16
    assert KVLayout(LAYOUT.groups, "int8").block_bytes(16) == 2 * 2 * 2 * (16 + 2) * 16


def test_a_value_that_is_a_part_of_its_key_takes_no_memory() -> None:
    latent = KVGroup((0,), 1, 576, 0, shared_dim=512)
    assert KVLayout((latent,), "bfloat16").block_bytes(16) == 576 * 16 * 2
    assert KVLayout((latent,), "fp8").block_bytes(16) == (576 + 2) * 16


def test_the_pool_is_as_large_as_its_memory_allows() -> None:
    size = EngineConfig(model="x", kv_cache_memory_bytes=10 * BLOCK_BYTES + 5)
    assert num_kv_blocks(size, BLOCK_BYTES) == 10
    assert num_kv_blocks(EngineConfig(model="x"), BLOCK_BYTES, 3 * BLOCK_BYTES) == 3
    fixed = EngineConfig(model="x", num_blocks=3, kv_cache_memory_bytes=1)
    assert num_kv_blocks(fixed, BLOCK_BYTES) == 3


def test_memory_for_less_than_a_block_is_refused() -> None:
    small = EngineConfig(model="x", kv_cache_memory_bytes=BLOCK_BYTES - 1)
    with pytest.raises(ConfigError, match=f"one block of this model takes {BLOCK_BYTES} bytes"):
        num_kv_blocks(small, BLOCK_BYTES)


def config_of(**settings: Any) -> EngineConfig:
    return EngineConfig(model="x", device="cuda", **settings)


def budget(block_bytes: int, **settings: Any) -> int:
    return gpu_budget_bytes(config_of(**settings), GPU_BYTES, WEIGHT_BYTES, block_bytes, MAX_BLOCKS)


def test_an_explicit_share_is_the_budget_of_the_whole_engine() -> None:
    """Weights, pool and overhead; the pool is rounded down to blocks."""
    for share in (0.25, 0.5, 0.92):
        found = budget(BLOCK_BYTES, gpu_memory_utilization=share)
        assert 0 <= GPU_BYTES * share - found <= BLOCK_BYTES
        pool = gpu_pool_bytes(
            config_of(gpu_memory_utilization=share),
            GPU_BYTES,
            WEIGHT_BYTES,
            BLOCK_BYTES,
            MAX_BLOCKS,
        )
        assert pool == int(GPU_BYTES * share) - WEIGHT_BYTES - GPU_OVERHEAD_BYTES


def test_by_default_room_for_a_small_engine_is_left() -> None:
    assert 0 <= int(GPU_BYTES * 0.92) - budget(2 << 20) < 2 << 20


def test_by_default_no_block_is_reserved_that_no_sequence_can_use() -> None:
    blocks = 4 * MAX_BLOCKS
    expected = WEIGHT_BYTES + GPU_OVERHEAD_BYTES + blocks * BLOCK_BYTES
    assert budget(BLOCK_BYTES, max_num_seqs=4) == expected
    assert budget(BLOCK_BYTES, max_num_seqs=4, gpu_memory_utilization=0.9) > expected


def test_a_given_pool_decides_the_budget() -> None:
    given = {"num_blocks": 100, "gpu_memory_utilization": 0.9}
    assert budget(BLOCK_BYTES, **given) == WEIGHT_BYTES + GPU_OVERHEAD_BYTES + 100 * BLOCK_BYTES
    given = {"kv_cache_memory_bytes": 50 * BLOCK_BYTES + 1}
    assert budget(BLOCK_BYTES, **given) == WEIGHT_BYTES + GPU_OVERHEAD_BYTES + 50 * BLOCK_BYTES


def test_weights_beyond_the_budget_are_refused() -> None:
    with pytest.raises(ConfigError, match="gpu_memory_utilization: 0 bytes are not enough"):
        budget(BLOCK_BYTES, gpu_memory_utilization=0.2)
