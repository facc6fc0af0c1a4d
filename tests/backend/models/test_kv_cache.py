"""One allocation holds all layers, and costs memory only where it is written."""

from __future__ import annotations

import psutil
import pytest
import torch

from inflight.checkpoint.locate import Checkpoint
from inflight.config import EngineConfig
from inflight.errors import ConfigError
from inflight.models.config import read_config
from inflight.models.kv_cache import KVCache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_are_views_of_one_zeroed_allocation(
    tiny_llama: Checkpoint, dtype: torch.dtype
) -> None:
    cache = KVCache(read_config(tiny_llama), 5, 4, dtype)
    assert cache.data.shape == (2, 2, 5, 4, 2, 16)
    assert cache.data.dtype == dtype
    assert not cache.data.any()
    keys, values = cache.layers[1]
    keys[3, 2] = 1
    values[0, 0] = 2
    assert (cache.data[1, 0, 3, 2] == 1).all()
    assert (cache.data[1, 1, 0, 0] == 2).all()
    assert cache.data.count_nonzero() == 2 * 2 * 16


def test_the_pool_has_the_bytes_that_the_settings_count(tiny_llama: Checkpoint) -> None:
    config = read_config(tiny_llama)
    settings = EngineConfig(model=".", block_size=4, dtype="bfloat16")
    data = KVCache(config, 7, 4, torch.bfloat16).data
    assert data.nbytes == 7 * config.kv_block_bytes(settings)


def test_unused_blocks_take_no_memory(tiny_llama: Checkpoint) -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    cache = KVCache(read_config(tiny_llama), 200_000, 16, torch.float32)
    assert cache.data.nbytes > 1 << 30
    assert process.memory_info().rss - before < 1 << 27


def test_more_than_can_be_addressed_is_refused(tiny_llama: Checkpoint) -> None:
    with pytest.raises(ConfigError, match="no memory for 1125899906842624 KV blocks"):
        KVCache(read_config(tiny_llama), 1 << 50, 16, torch.float32)
