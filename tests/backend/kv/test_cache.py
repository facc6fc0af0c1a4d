"""Layers of one shape are one allocation, which costs memory only where it is written."""

from __future__ import annotations

from dataclasses import replace

import psutil
import pytest
import torch

from inflight.config import Dtype, KVDtype
from inflight.errors import ConfigError
from inflight.kv.cache import KVCache
from inflight.kv.layout import KVGroup, KVLayout
from inflight_kernels.torch_ops import kv_quantization, transformer
from inflight_kernels.torch_ops.kv_quantization import QuantizedKV


def layout(dtype: Dtype = "float32") -> KVLayout:
    return KVLayout((KVGroup((0, 1), 2, 16, 16),), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_are_views_of_one_zeroed_allocation(dtype: Dtype) -> None:
    cache = KVCache(layout(dtype), 5, 4)
    (data,) = cache.data
    assert data.shape == (2, 2, 5, 4, 2, 16)
    assert data.dtype == cache.dtype == getattr(torch, dtype)
    assert cache.block_size == 4
    assert not data.any()
    keys, values = cache.layers[1]
    keys[3, 2] = 1
    values[0, 0] = 2
    assert (data[1, 0, 3, 2] == 1).all()
    assert (data[1, 1, 0, 0] == 2).all()
    assert data.count_nonzero() == 2 * 2 * 16


def test_layers_of_other_shapes_have_memory_of_their_own() -> None:
    groups = (KVGroup((0, 2), 2, 16, 16), KVGroup((1,), 1, 24, 8))
    cache = KVCache(KVLayout(groups, "float32"), 5, 4)
    assert [tuple(data.shape) for data in cache.data] == [
        (2, 2, 5, 4, 2, 16),
        (1, 5, 4, 1, 24),
        (1, 5, 4, 1, 8),
    ]
    assert [tuple(part.shape) for part in cache.layers[1]] == [(5, 4, 1, 24), (5, 4, 1, 8)]
    cache.layers[2][0].fill_(1)
    assert cache.data[0][1, 0].all() and not cache.data[0][0].any()


LATENT = KVGroup((0, 1), 1, 24, 0, shared_dim=16)


def test_values_that_are_a_part_of_their_keys_are_views_of_the_same_memory() -> None:
    cache = KVCache(KVLayout((LATENT,), "float32"), 5, 4)
    (data,) = cache.data
    assert data.shape == (2, 5, 4, 1, 24)
    keys, values = cache.layers[1]
    assert (keys.shape, values.shape) == ((5, 4, 1, 24), (5, 4, 1, 16))
    random = torch.Generator().manual_seed(0)
    transformer.write_rows(torch.randn(1, 1, 24, generator=random), keys, torch.tensor([13]))
    assert data[1, 3, 1].all()
    assert data.count_nonzero() == 24
    assert torch.equal(values, keys[..., :16])


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_a_key_of_8_bits_and_the_value_in_it_have_one_scale(dtype: KVDtype) -> None:
    cache = KVCache(KVLayout((LATENT,), dtype), 5, 4)
    (data,) = cache.data
    assert data.shape == (2, 5, 4, 1, 26)
    keys, values = cache.layers[1]
    rows = torch.randn(1, 1, 24, generator=torch.Generator().manual_seed(0))
    transformer.write_rows(rows, keys, torch.tensor([13]))
    assert isinstance(keys, QuantizedKV) and isinstance(values, QuantizedKV)
    assert keys.scales.data_ptr() == values.scales.data_ptr()
    block = torch.tensor([3])
    read = kv_quantization.read_blocks(values, block, torch.float32)
    assert torch.equal(read, kv_quantization.read_blocks(keys, block, torch.float32)[..., :16])
    torch.testing.assert_close(read[0, 1], rows[0, :, :16], rtol=0.07, atol=0.02)
    cache.clear_slots(0, torch.tensor([13]))
    assert not data.any()


def test_tables_share_blocks_of_keys_alone() -> None:
    shape = {"num_kv_heads": 1, "k_dim": 6, "v_dim": 0, "shared_dim": 4}
    groups = (KVGroup((0, 1), **shape, window=8), KVGroup((2,), **shape))
    shared = KVLayout(groups, "float32", frees_windows=True)
    cache = KVCache(shared, 5, 4)
    assert sum(data.nbytes for data in cache.data) == 5 * shared.block_bytes(4)
    for layer, (keys, values) in enumerate(cache.layers):
        (data,) = cache.data
        data.zero_()
        keys[cache.kernel_blocks[cache.table_of[layer]].ids([3])] = 1
        assert data[:, 3].any() and not data[:, [0, 1, 2, 4]].any()
        assert torch.equal(values, keys[..., :4])


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8", "int8"])
def test_the_pool_has_the_bytes_that_the_layout_counts(dtype: KVDtype) -> None:
    groups = (KVGroup((0, 2), 2, 16, 16), KVGroup((1,), 1, 24, 8), replace(LATENT, layers=(3,)))
    cache = KVCache(KVLayout(groups, dtype), 7, 4)
    assert sum(data.nbytes for data in cache.data) == 7 * KVLayout(groups, dtype).block_bytes(4)


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_blocks_of_8_bits_are_multiples_of_16_bytes_with_their_scales_inside(
    dtype: KVDtype, block_size: int
) -> None:
    """As the kernels load them, whatever the heads."""
    for heads, width in ((1, 64), (3, 64), (8, 128), (5, 96)):
        cache = KVCache(KVLayout((KVGroup((0, 1), heads, width, width),), dtype), 3, block_size)
        for pair in cache.layers:
            for memory in pair:
                assert isinstance(memory, QuantizedKV)
                values, scales = memory.values, memory.scales
                assert values.stride() == (values.stride(0), heads * width, width, 1)
                assert values.stride(0) % 16 == values.data_ptr() % 16 == 0
                begin = scales.data_ptr() - values.data_ptr()
                assert begin == block_size * heads * width and begin % 16 == 0
                assert begin + heads * block_size * 2 == values.stride(0) == scales.stride(0) * 2
                assert scales.stride()[1:] == (block_size, 1)


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_tables_of_8_bits_share_blocks_as_others_do(dtype: KVDtype) -> None:
    shape = {"num_kv_heads": 2, "k_dim": 4, "v_dim": 4}
    groups = (KVGroup((0, 1, 3, 4, 5), **shape, window=8), KVGroup((2, 6), **shape))
    shared = KVLayout(groups, dtype, frees_windows=True)
    cache = KVCache(shared, 5, 4)
    assert sum(data.nbytes for data in cache.data) == 5 * shared.block_bytes(4)
    for layer, pair in enumerate(cache.layers):
        split = cache.kernel_blocks[cache.table_of[layer]]
        ids = split.ids([3])
        for memory in pair:
            assert isinstance(memory, QuantizedKV)
            memory.values.view(torch.uint8)[ids] = 1
            memory.scales[ids] = 1
        for data in cache.data:
            assert data[:, 3].any() and not data[:, [0, 1, 2, 4]].any()
        cache.clear_slots(cache.table_of[layer], torch.tensor(ids)[:, None] * 4 + torch.arange(4))
        assert not any(data.any() for data in cache.data)


def test_layers_of_several_tables_share_the_memory_of_a_block_and_of_no_other() -> None:
    shape = {"num_kv_heads": 2, "k_dim": 4, "v_dim": 4}
    groups = (KVGroup((0, 1, 3, 4, 5), **shape, window=8), KVGroup((2, 6), **shape))
    shared = KVLayout(groups, "float32", frees_windows=True)
    cache = KVCache(shared, 5, 4)
    assert sum(data.nbytes for data in cache.data) == 5 * shared.block_bytes(4)
    assert [split.count for split in cache.kernel_blocks] == [2, 1]
    assert cache.table_of == [1, 1, 0, 1, 1, 1, 0]
    for layer, (keys, values) in enumerate(cache.layers):
        split = cache.kernel_blocks[cache.table_of[layer]]
        for block in range(5):
            for data in cache.data:
                data.zero_()
            ids = split.ids([block])
            keys[ids] = 1
            values[ids] = 1
            for data in cache.data:
                assert data[:, block].count_nonzero() == len(ids) * keys[0].numel()
                assert data.count_nonzero() == data[:, block].count_nonzero()
    # No two layers of one table share anything.
    for index, split in enumerate(cache.kernel_blocks):
        for data in cache.data:
            data.zero_()
        own = [
            pair for pair, table in zip(cache.layers, cache.table_of, strict=True) if table == index
        ]
        for keys, values in own:
            for part in (keys, values):
                assert not part[split.ids([*range(5)])].any()
                part.fill_(1)
        assert sum(int(view.count_nonzero()) for view in cache.views[index]) == sum(
            part.numel() for pair in own for part in pair
        )


def test_unused_blocks_use_no_memory() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    cache = KVCache(layout(), 200_000, 16)
    assert cache.data[0].nbytes > 1 << 30
    assert process.memory_info().rss - before < 1 << 27


def test_sizes_beyond_32_bits_are_rejected() -> None:
    with pytest.raises(ConfigError, match="out of memory for 1125899906842624 KV blocks"):
        KVCache(layout(), 1 << 50, 16)
