"""Tiling of the linear layers for few tokens, without a GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from inflight_kernels.ops.linear import operands, skinny_gemm
from inflight_kernels.ops.linear.skinny_gemm import MAX_QUANTIZED_TOKENS, MAX_TOKENS, plan

# Rows of weights: of models of 135M, 1B, 3B, 7B, 8B, 14B, 32B and 70B, their shards, and odd ones.
ROWS = [
    *(8, 192, 576, 960, 1000, 1280, 2048, 2560, 3072, 3584, 4096, 4608, 5120, 6144, 7168, 8192),
    *(8448, 8456, 9216, 10240, 16384, 18944, 19008, 19016, 22016, 27648, 28672, 35840, 57344),
    *(49152, 128256, 151936, 262144),
]
HOPPER = 132


@pytest.mark.parametrize("n", ROWS)
@pytest.mark.parametrize("num_multiprocessors", [2, 78, 114, HOPPER])
def test_every_row_is_in_one_tile(n: int, num_multiprocessors: int) -> None:
    cut = plan(n, num_multiprocessors)
    assert (cut.tiles - 1) * cut.rows < n <= cut.tiles * cut.rows
    assert cut.rows in (skinny_gemm._PAIR_ROWS if cut.pair else skinny_gemm._BLOCK_ROWS)


@pytest.mark.parametrize("n", ROWS)
@pytest.mark.parametrize("num_multiprocessors", [2, 78, 114, HOPPER])
def test_blocks_run_concurrently_and_each_pair_has_its_own_tile(
    n: int, num_multiprocessors: int
) -> None:
    cut = plan(n, num_multiprocessors)
    assert 0 < cut.blocks <= num_multiprocessors
    if cut.pair:
        assert cut.blocks == 2 * cut.tiles


@pytest.mark.parametrize("n", [n for n in ROWS if n >= 3072])
def test_the_busiest_block_has_little_more_than_its_share(n: int) -> None:
    """Of the weights, on a Hopper GPU: the rest wait for it."""
    cut = plan(n, HOPPER)
    busiest = -(-cut.tiles // cut.blocks) * cut.rows if not cut.pair else cut.rows / 2
    assert n / HOPPER / busiest >= 0.8


@pytest.mark.parametrize("n", [4096, 6144, 28672, 128256])
def test_the_busiest_block_of_an_8b_model_has_almost_exactly_its_share(n: int) -> None:
    cut = plan(n, HOPPER)
    busiest = -(-cut.tiles // cut.blocks) * cut.rows if not cut.pair else cut.rows / 2
    assert n / HOPPER / busiest >= 0.96


@pytest.mark.parametrize("n", ROWS)
@pytest.mark.parametrize("m", [1, 8, 9, MAX_TOKENS])
@pytest.mark.parametrize("k_bytes", [1152, 4096, 8192, 28672])
def test_a_multiprocessor_has_one_block(n: int, m: int, k_bytes: int) -> None:
    """228 KiB on Hopper, of which a block costs 1 KiB more than it asks for, and gets 227."""
    cut = plan(n, HOPPER)
    quantizes = m <= MAX_QUANTIZED_TOKENS and k_bytes <= (16384 if cut.pair else 8192)
    for quantizing in {False, quantizes}:
        stages, shared, _ = cut.ring(m, k_bytes, quantizes=quantizing)
        assert shared <= 227 * 1024 < 2 * (shared + 1024)
        assert stages >= min(5, -(-k_bytes // 256))


@pytest.mark.parametrize("n", ROWS)
def test_beside_a_block_of_few_tokens_is_room_for_one_of_attention(n: int) -> None:
    """Of 105 KiB in total, for heads of 128 values in 16 bits."""
    shared = plan(n, HOPPER).ring(1, 8192).shared_bytes
    assert (shared + 1024) + 105 * 1024 <= 228 * 1024


@pytest.mark.parametrize(("k", "steps"), [(2048, 8), (4096, 16)])
def test_a_ring_has_no_more_stages_than_a_block_has_steps(k: int, steps: int) -> None:
    """Of FP8, of which a pair's block has half of the columns."""
    cut = plan(5120, HOPPER)
    assert cut.pair
    for m in (1, MAX_TOKENS):
        stages, shared, is_whole = cut.ring(m, k)
        rows = cut.rows + (8 if m == 1 else MAX_TOKENS)
        assert stages == min(steps, (shared - 1024 - cut.rows * 128) // (rows * 128 + 16))
        assert is_whole == (stages == steps)
    assert cut.ring(1, 2048, quantizes=True).stages == 8


def test_constants_are_the_same_on_both_sides() -> None:
    sources = Path(skinny_gemm.__file__).parents[2] / "csrc/linear"
    source = (sources / "skinny_gemm.cuh").read_text() + (sources / "skinny_input.cuh").read_text()
    found = {name: int(value) for name, value in re.findall(r"int (\w+) = (\d+);", source)}
    assert (found["WARPS"] + 1) * 32 == skinny_gemm._THREADS
    assert skinny_gemm._THREADS + found["HELPERS"] * 32 == skinny_gemm._QUANTIZING_THREADS
    assert found["TOKENS"] == skinny_gemm._TOKENS == MAX_TOKENS
    assert found["ATOM"] == skinny_gemm._FEW_TOKENS >= skinny_gemm.MAX_QUANTIZED_TOKENS
    header = (sources / "hopper_linear.cuh").read_text()
    assert f"STAGE_DEPTH = {operands.STAGE_DEPTH_BYTES} / " in header


def test_few_tokens_on_hopper_are_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skinny_gemm, "is_hopper", lambda: True)
    assert all(skinny_gemm.prefers(m, n, 4096) for m in (1, 32, MAX_TOKENS) for n in ROWS)
    assert not any(skinny_gemm.prefers(m, n, 4096) for m in (0, MAX_TOKENS + 1) for n in ROWS)
    assert not skinny_gemm.prefers(1, 4096, 4100)
    monkeypatch.setattr(skinny_gemm, "is_hopper", lambda: False)
    assert not skinny_gemm.prefers(1, 4096, 4096)
