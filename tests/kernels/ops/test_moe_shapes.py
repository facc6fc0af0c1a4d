"""Tiles of the products of experts."""

from __future__ import annotations

import pytest
import torch

from inflight.models import gpu_support
from inflight_kernels.ops.linear import grouped_rows
from inflight_kernels.ops.linear.grouped_rows import GroupedKind
from inflight_kernels.ops.linear.operands import MAX_SHARED_BYTES
from inflight_kernels.ops.moe import routing
from inflight_kernels.ops.moe.products import instantiations, shape_of, tile_of

H200 = 132
LAYERS = [(128, 8, 1536), (8, 2, 28672), (32, 4, 5760), (64, 6, 2816), (16, 1, 512)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("k", [512, 4096])
@pytest.mark.parametrize(("experts", "top_k", "n"), LAYERS)
def test_every_number_of_tokens_has_a_compiled_shape(
    experts: int, top_k: int, n: int, k: int, dtype: torch.dtype
) -> None:
    compiled = {name for _, names, _ in instantiations() for name in names}
    value = {2: "__nv_bfloat16", 1: "Fp8"}[dtype.itemsize]
    for tokens in (*range(1, 300), 512, 1024, 4096, 16384):
        tile = tile_of(tokens, experts, top_k, dtype)
        cut = shape_of(tile, n, k, tokens, experts, top_k, dtype, H200)
        assert cut.tokens == tile
        assert cut.stages >= 4
        assert cut.shared_bytes <= MAX_SHARED_BYTES
        kind = "experts_product_pairs" if cut.pair else "experts_product"
        name = (
            f"{kind}<{value}, __nv_bfloat16, {cut.tokens}, {cut.rows}, {cut.groups}, {cut.stages}, "
        )
        assert any(found.startswith(name) for found in compiled)


@pytest.mark.parametrize("kind", grouped_rows.KINDS, ids=lambda kind: kind.name)
def test_every_number_of_tokens_has_a_shape_for_records(kind: GroupedKind) -> None:
    compiled = {name for _, names, _ in instantiations() for name in names}
    is_of_gpt_oss = kind == GroupedKind(grouped_rows.E2M1, 32, minimums=False)
    for experts, top_k, n in LAYERS:
        for tokens in (*range(1, 300), 512, 1024, 4096, 16384):
            tile = tile_of(tokens, experts, top_k, kind)
            cut = shape_of(tile, n, 2880, tokens, experts, top_k, kind, H200)
            assert cut.tokens == tile <= 128 and not cut.pair
            assert cut.stages >= 3
            assert cut.shared_bytes <= MAX_SHARED_BYTES
            name = (
                f"experts_product_codes<{kind.name}, __nv_bfloat16, {cut.tokens}, {cut.rows}, "
                f"{cut.groups}, {cut.stages}, "
            )
            if is_of_gpt_oss or tile == 128:
                assert any(found.startswith(name) for found in compiled)


def test_tiles_grow_with_the_rows_of_an_expert() -> None:
    found = [tile_of(tokens, 128, 8, torch.bfloat16) for tokens in (1, 64, 256, 512, 2048, 8192)]
    assert found == [8, 16, 32, 64, 256, 256]


def test_few_rows_of_the_weight_keep_all_multiprocessors_busy() -> None:
    """8 experts of 1,536 rows are 192 tiles of 64 rows, two rounds, or 256 of 48, two as well."""
    assert shape_of(8, 1536, 2048, 1, 128, 8, torch.bfloat16, H200).rows == 48
    assert shape_of(8, 2048, 768, 1, 128, 8, torch.bfloat16, H200).rows == 64


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
