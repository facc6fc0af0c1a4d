"""The pool of KV blocks is as large as its memory allows."""

from __future__ import annotations

import pytest

from inflight.config import EngineConfig
from inflight.errors import ConfigError
from inflight.kv.budget import num_kv_blocks
from inflight.kv.layout import KVGroup, KVLayout

LAYOUT = KVLayout((KVGroup((0, 1), 2, 16, 16),), "float32")
BLOCK_BYTES = 2 * 2 * 2 * 16 * 16 * 4  # k and v, layers, heads, head_dim, tokens, bytes


def test_a_block_holds_keys_and_values_of_all_layers() -> None:
    assert LAYOUT.block_bytes(16) == BLOCK_BYTES
    assert KVLayout(LAYOUT.groups, "bfloat16").block_bytes(16) == BLOCK_BYTES // 2
    latent = KVGroup((0,), 1, 576, 512)
    assert KVLayout((latent,), "bfloat16").block_bytes(16) == (576 + 512) * 16 * 2


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
