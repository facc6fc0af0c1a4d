"""Tiles of the products of experts."""

from __future__ import annotations

import pytest
import torch

from inflight.models import gpu_support
from inflight_kernels.ops.linear import grouped_rows
from inflight_kernels.ops.linear.grouped_rows import GroupedKind
from inflight_kernels.ops.linear.operands import MAX_SHARED_BYTES
from inflight_kernels.ops.moe import routing
from inflight_kernels.ops.moe.products import ROWS, Shape, instantiations, shape_of, tile_of

H200 = 132
LAYERS = [(128, 8), (8, 2), (32, 4), (64, 6), (16, 1)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("experts", "top_k"), LAYERS)
def test_every_number_of_tokens_has_a_compiled_shape(
    experts: int, top_k: int, dtype: torch.dtype
) -> None:
    compiled = {name for _, names, _ in instantiations() for name in names}
    value = {2: "__nv_bfloat16", 1: "Fp8"}[dtype.itemsize]
    for tokens in (*range(1, 300), 512, 1024, 4096, 16384):
        tile = tile_of(tokens, experts, top_k, dtype)
        cut = shape_of(tile, dtype)
        assert cut.tokens == tile
        assert cut.stages >= 4
        assert cut.shared_bytes <= MAX_SHARED_BYTES
        name = f"experts_product<{value}, __nv_bfloat16, {tile}, {cut.stages}, {cut.blocks}, "
        if cut.pair:
            name = f"experts_product_pairs<{value}, __nv_bfloat16, {tile}, {cut.stages}, "
        assert any(found.startswith(name) for found in compiled)


@pytest.mark.parametrize("kind", grouped_rows.KINDS, ids=lambda kind: kind.name)
def test_every_number_of_tokens_has_a_shape_for_records(kind: GroupedKind) -> None:
    compiled = {name for _, names, _ in instantiations() for name in names}
    is_of_gpt_oss = kind == GroupedKind(grouped_rows.E2M1, 32, minimums=False)
    for experts, top_k in LAYERS:
        for tokens in (*range(1, 300), 512, 1024, 4096, 16384):
            tile = tile_of(tokens, experts, top_k, kind)
            cut = shape_of(tile, kind)
            assert cut.tokens == tile <= 128 and not cut.pair
            assert cut.stages >= 3
            assert cut.shared_bytes <= MAX_SHARED_BYTES
            name = f"experts_product_codes<{kind.name}, __nv_bfloat16, {tile}, {cut.stages}, "
            if is_of_gpt_oss or tile == 128:
                assert any(found.startswith(name) for found in compiled)


def test_tiles_grow_with_the_rows_of_an_expert() -> None:
    found = [tile_of(tokens, 128, 8, torch.bfloat16) for tokens in (1, 64, 256, 512, 2048, 8192)]
    assert found == [8, 8, 32, 64, 256, 256]


def test_few_experts_exceed_a_tile() -> None:
    """64 tokens have 4 rows of each of 128 experts, of which one in fifty has more than 8."""
    generator = torch.Generator().manual_seed(0)
    for tokens in (32, 64, 128, 256):
        tile = tile_of(tokens, 128, 8, torch.bfloat16)
        chosen = torch.rand(tokens, 128, generator=generator).topk(8).indices
        counts = chosen.flatten().bincount(minlength=128)
        assert (counts > tile).float().mean() < 0.06
        assert tile == 8 or (counts > tile / 2).float().mean() > 0.06


@pytest.mark.parametrize("tile", [8, 16, 32])
def test_a_multiprocessor_has_two_blocks_of_short_tiles(tile: int) -> None:
    cut = shape_of(tile, torch.float8_e4m3fn)
    assert cut.blocks == 2
    assert 2 * (cut.shared_bytes + 1024) <= 228 * 1024
    assert shape_of(tile, torch.bfloat16).blocks == 1
    assert shape_of(64, torch.float8_e4m3fn).blocks == 1


def test_a_launch_has_no_more_blocks_than_tiles_or_room() -> None:
    one, two, pair = Shape(8), Shape(8, blocks=2), Shape(256, pair=True)
    assert one.grid(3, ROWS + 1, H200) == 6
    assert one.grid(300, 2048, H200) == H200
    assert two.grid(300, 2048, H200) == 2 * H200
    assert pair.grid(3, 2 * ROWS + 1, H200) == 12
    assert pair.grid(300, 2048, H200) == H200


def test_gpu_support_states_the_limits_of_the_kernels() -> None:
    assert gpu_support.MAX_EXPERTS == routing.MAX_EXPERTS
    assert gpu_support.MAX_TOP_K == routing.MAX_TOP_K
    assert gpu_support.MAX_EXPERT_GROUPS == routing.MAX_GROUPS


@pytest.mark.parametrize("max_tokens", [1, 64, 65, 200, 600, 2048, 2049, 8192])
def test_memory_for_the_most_tokens_is_enough_for_fewer(max_tokens: int) -> None:
    """Fewer tokens may be in more blocks."""
    experts, top_k = 16, 2
    routed = routing.Routed(max_tokens, experts, top_k, "cpu")
    for tokens in range(1, max_tokens + 1):
        size = routing.block_tokens(tokens)
        assert -(-tokens // size) * experts <= len(routed.starts)
