"""Tiling of the linear layers for up to 8 tokens, without a GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from inflight_kernels.ops.linear import few_gemm, skinny_gemm
from inflight_kernels.ops.linear.few_gemm import MAX_TOKENS, ROWS, instantiations, plan, prefers
from inflight_kernels.ops.linear.operands import (
    MAX_SHARED_BYTES,
    STAGE_DEPTH_BYTES,
    NormedRows,
    SummedRows,
)
from inflight_kernels.runtime.recording import record_launches

HOPPER = 132
# (n, k): q | k | v and o of models of 135M, 1B, 8B, 14B, of gpt-oss-20b and Qwen3-30B-A3B; routers.
SHAPES = [
    *((960, 576), (576, 576), (3072, 2048), (2048, 2048), (6144, 4096), (4096, 4096)),
    *((7168, 5120), (5120, 5120), (5120, 2880), (2880, 4096), (5120, 2048), (2048, 4096)),
    *((32, 2880), (128, 2048), (8, 64), (1001, 1280), (7392, 5120)),
]


@pytest.fixture(autouse=True)
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (few_gemm, skinny_gemm):
        monkeypatch.setattr(module, "num_multiprocessors", lambda: HOPPER)
        monkeypatch.setattr(module, "is_hopper", lambda: True)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_plan_fits_and_each_block_has_a_tile(n: int, k: int) -> None:
    supported = [m for m in range(1, MAX_TOKENS + 1) if prefers(m, n, k)]
    assert supported[:2] == [1, 2]
    for m in supported:
        _check_plan(m, n, k)


def _check_plan(m: int, n: int, k: int) -> None:
    cut = plan(m, n, k, HOPPER)
    assert (cut.blocks - 1) * cut.rows < n <= cut.blocks * cut.rows
    assert cut.blocks <= HOPPER
    assert cut.rows == ROWS[0] or n > (cut.rows - 8) * HOPPER, "a smaller tile would do"
    assert cut.shared_bytes <= MAX_SHARED_BYTES
    assert 2 * (cut.shared_bytes + 1024) > 228 * 1024, "a multiprocessor has one block"


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("m", [1, 3, MAX_TOKENS])
def test_each_slot_of_the_ring_is_one_consumers(m: int, n: int, k: int) -> None:
    """Otherwise a consumer might wait for a phase after the next one, which looks like this one."""
    cut = plan(m, n, k, HOPPER)
    assert cut.stages > 0
    assert cut.stages % few_gemm._CONSUMERS == 0


@pytest.mark.parametrize(("n", "k"), [(5120, 2880), (6144, 4096), (4096, 4096), (7392, 5120)])
def test_a_block_of_attention_fits_beside_a_ring_without_all_weights(n: int, k: int) -> None:
    """Of 56 KiB, for one request with heads of 64 or 128 values."""
    cut = plan(1, n, k, HOPPER)
    assert cut.stages * cut.boxes < k * 2 // STAGE_DEPTH_BYTES
    assert cut.shared_bytes + 1024 + 57 * 1024 <= 228 * 1024
    assert cut.stages * cut.boxes * cut.rows * STAGE_DEPTH_BYTES >= 80 * 1024


@pytest.mark.parametrize(("n", "k"), [(2880, 4096), (5120, 2048), (2048, 4096), (960, 576)])
def test_all_weights_of_a_small_share_are_copied_early(n: int, k: int) -> None:
    """Each consumer's in one stage."""
    cut = plan(1, n, k, HOPPER)
    assert cut.stages == few_gemm._CONSUMERS
    assert cut.stages * cut.boxes >= k * 2 // STAGE_DEPTH_BYTES


def test_small_products_of_few_tokens_are_preferred() -> None:
    assert all(prefers(1, n, k) for n, k in SHAPES)
    assert prefers(8, 960, 576)
    assert not prefers(MAX_TOKENS + 1, 960, 576)
    assert not prefers(1, ROWS[-1] * HOPPER + 1, 4096)
    assert not prefers(1, 4096, 14336)
    assert not prefers(4, 4096, 4096), "x would leave too little room"
    assert not prefers(1, 1001, 1288), "columns past the last box"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("m", "gated", "widens", "stem"),
    [
        *((m, False, widens, "few_gemm") for m in (1, 8) for widens in (False, True)),
        *((9, False, widens, "skinny_gemm") for widens in (False, True)),
        (1, True, False, "skinny_gemm"),
    ],
)
def test_a_product_has_a_compiled_kernel(
    m: int, gated: bool, widens: bool, stem: str, dtype: torch.dtype
) -> None:
    compiled = {
        (stem, name)
        for module in (few_gemm, skinny_gemm)
        for stem, names, _ in module.instantiations()
        for name in names
    }
    x, weight = (torch.empty(size, 576, dtype=dtype, device="meta") for size in (m, 1152))
    width = 576 if gated else 1152
    out = torch.empty(m, width, dtype=torch.float32 if widens else dtype, device="meta")
    with record_launches() as launched:
        skinny_gemm.linear(x, weight, out=out, gated=gated)
    assert {found for found, _ in launched} == {stem}
    assert set(launched) <= compiled


@pytest.mark.parametrize("is_sum", [False, True])
def test_the_norm_of_few_tokens_is_part_of_their_product(is_sum: bool) -> None:
    compiled = {name for _, names, _ in instantiations() for name in names}
    x = _norm_of(2, 2048, is_sum=is_sum)
    weight = torch.empty(5120, 2048, dtype=torch.bfloat16, device="meta")
    out = torch.empty(2, 5120, dtype=torch.bfloat16, device="meta")
    assert few_gemm.can_norm(2, 5120, 2048)
    with record_launches() as launched:
        few_gemm.norm_linear(x, weight, out=out)
    assert list(launched) == [("few_gemm", "norm_few_gemm<__nv_bfloat16, 40>")]
    assert {name for _, name in launched} <= compiled


def test_norms_are_for_few_tokens_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    assert few_gemm.can_norm(2, 5120, 2048)
    assert not few_gemm.can_norm(0, 5120, 2048)
    assert not few_gemm.can_norm(2, 10240, 2048)
    monkeypatch.setattr(few_gemm, "is_hopper", lambda: False)
    assert not few_gemm.can_norm(2, 5120, 2048)


def _norm_of(m: int, k: int, *, is_sum: bool) -> NormedRows | SummedRows:
    rows = torch.empty(m, k, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(k, device="meta")
    if not is_sum:
        return NormedRows(rows, weight, 1e-6)
    residual, total = (torch.empty(m, k, device="meta") for _ in range(2))
    return SummedRows(rows, residual, total, weight, 1e-6)


def test_every_tile_is_compiled_for_every_type() -> None:
    """Of x in two types, and out in x's or in float32; and of norms in bfloat16."""
    names = [name for _, names, _ in instantiations() for name in names]
    assert len(names) == len(set(names)) == (4 + 1) * len(ROWS)


def test_constants_are_the_same_on_both_sides() -> None:
    source = (Path(few_gemm.__file__).parents[2] / "csrc/linear/few_gemm.cu").read_text()
    found = {name: int(value) for name, value in re.findall(r"int (\w+) = (\d+);", source)}
    assert found["CONSUMERS"] == few_gemm._CONSUMERS
    assert found["VECTORS"] * found["CONSUMERS"] * 32 * 8 >= few_gemm._MAX_INPUTS
    assert (found["CONSUMERS"] + 1) * 32 == few_gemm._THREADS
