"""Linear layers for few tokens against float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from graph_replay import check_replays
from guarded import ROUNDING, Guarded, relative_error
from inflight_kernels.ops.linear import few_gemm, skinny_gemm
from inflight_kernels.ops.linear.operands import (
    MAX_SHARED_BYTES,
    STAGE_DEPTH_BYTES,
    NormedRows,
    SummedRows,
)
from inflight_kernels.ops.linear.skinny_gemm import MAX_TOKENS, Plan, linear, plan
from inflight_kernels.runtime.launch import num_multiprocessors
from inflight_kernels.torch_ops import transformer

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16]
TOKENS = [1, 2, 4, 5, 8, 9, 16, 17, 32, 33, 63, 64]
# (n, k): of an 8B model, of one of 135M, and what no tile divides. Rows of an odd length are stored
# value by value.
SHAPES = [
    (6144, 4096),
    (4096, 4096),
    (4096, 14336),
    (32000, 576),
    (960, 576),
    (576, 1536),
    (1001, 1288),
    (8, 8),
]


def _random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def _float32_error(cut: Plan, k: int) -> float:
    """Bound of `relative_error` for a product of random operands that is not rounded in the end.

    The tensor cores add 16 products at a time and cut a sum off where float32 would round it: each
    time up to 2**-23 of it is lost, half of that on average, towards zero. Over a chain of c such
    additions the sum grows as a random walk does, which makes the loss c * 2**-24 * 2/3 of the
    result at most. A chain has k / 16 additions, or half of them in each block of a pair. The sum
    of both is rounded: 16 half units are plenty for it.
    """
    depth = STAGE_DEPTH_BYTES // 2
    steps = math.ceil(k / depth / (2 if cut.pair else 1))
    return (steps * depth // 16 + 16) * 2.0**-24


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("tokens", TOKENS)
def test_a_product_is_that_of_the_reference(
    dtype: torch.dtype, n: int, k: int, tokens: int
) -> None:
    x, weight = _random(tokens, k, dtype=dtype), _random(n, k, dtype=dtype, scale=k**-0.5)
    expected = transformer.linear(x.double(), weight.double())
    exact = _float32_error(plan(n, num_multiprocessors()), k)
    for out_type, bound in ((dtype, ROUNDING[dtype]), (torch.float32, exact)):
        out = Guarded(tokens, n, dtype=out_type)
        linear(x, weight, out=out.tensor)
        assert relative_error(out.check(), expected) < bound


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (1000, 1288)])
def test_bias_and_residual_are_added_before_rounding(
    dtype: torch.dtype, tokens: int, n: int, k: int
) -> None:
    x, weight = _random(tokens, k, dtype=dtype), _random(n, k, dtype=dtype, scale=k**-0.5)
    bias, residual = _random(n, dtype=dtype), _random(tokens, n, dtype=dtype)
    out = Guarded(tokens, n, dtype=dtype)
    linear(x, weight, bias=bias, residual=residual, out=out.tensor)
    expected = transformer.linear(x.double(), weight.double(), bias.double()) + residual.double()
    assert relative_error(out.check(), expected) < ROUNDING[dtype]
    linear(x, weight, bias=bias, residual=residual, out=residual)
    assert torch.equal(residual, out.tensor), "the result may lie where the residual was"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("width", "k"), [(14336, 4096), (1536, 576), (1005, 1288)])
def test_a_gated_product_is_silu_of_one_half_times_the_other(
    dtype: torch.dtype, tokens: int, width: int, k: int
) -> None:
    x, weight = _random(tokens, k, dtype=dtype), _random(2 * width, k, dtype=dtype, scale=k**-0.5)
    bias = _random(2 * width, dtype=dtype)
    out = Guarded(tokens, width, dtype=dtype)
    linear(x, weight, bias=bias, out=out.tensor, gated=True)
    gate, up = F.linear(x.double(), weight.double(), bias.double()).chunk(2, -1)
    assert relative_error(out.check(), F.silu(gate) * up) < ROUNDING[dtype]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "pair"),
    [(rows, True) for rows in skinny_gemm._PAIR_ROWS]
    + [(rows, False) for rows in skinny_gemm._BLOCK_ROWS],
)
def test_tiles_of_every_size_come_to_the_same(
    monkeypatch: pytest.MonkeyPatch, rows: int, pair: bool, dtype: torch.dtype, gated: bool
) -> None:
    """Five tiles, the last of them not whole, and two blocks for them all where that may be."""
    tokens, n, k = 43, 5 * rows - 6, 1288
    cut = Plan(rows, pair, 5, 10 if pair else 2)
    monkeypatch.setattr(skinny_gemm, "plan", lambda *shape: cut)
    x, weight = _random(tokens, k, dtype=dtype), _random(n, k, dtype=dtype, scale=k**-0.5)
    bias = _random(n, dtype=dtype)
    expected = F.linear(x.double(), weight.double(), bias.double())
    if gated:
        gate, up = expected.chunk(2, -1)
        expected = F.silu(gate) * up
    residual = _random(*expected.shape, dtype=dtype)
    out = Guarded(*expected.shape, dtype=dtype)
    linear(x, weight, bias=bias, residual=residual, out=out.tensor, gated=gated)
    assert relative_error(out.check(), expected + residual.double()) < ROUNDING[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", few_gemm.ROWS)
@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize(("blocks", "k"), [(5, 1024), (2, 2880), (2, 64)])
def test_tiles_of_every_size_of_very_few_tokens_come_to_the_same(
    monkeypatch: pytest.MonkeyPatch,
    blocks: int,
    k: int,
    tokens: int,
    rows: int,
    dtype: torch.dtype,
) -> None:
    """Five tiles, the last of them not whole; of 2 blocks, some more than the ring has stages."""
    n = 5 * rows - 6
    cut = few_gemm.plan_with(rows, tokens, n, k, blocks)
    if k == 2880:
        cut = replace(cut, boxes=2, stages=8, shared_bytes=MAX_SHARED_BYTES)
    monkeypatch.setattr(few_gemm, "plan", lambda *shape: cut)
    monkeypatch.setattr(few_gemm, "prefers", lambda *shape: True)
    x, weight = _random(tokens, k, dtype=dtype), _random(n, k, dtype=dtype, scale=k**-0.5)
    bias, residual = _random(n, dtype=dtype), _random(tokens, n, dtype=dtype)
    out = Guarded(tokens, n, dtype=dtype)
    linear(x, weight, bias=bias, residual=residual, out=out.tensor)
    expected = F.linear(x.double(), weight.double(), bias.double()) + residual.double()
    assert relative_error(out.check(), expected) < ROUNDING[dtype]


@pytest.mark.parametrize("is_sum", [False, True])
@pytest.mark.parametrize(
    ("n", "k", "tokens"),
    [
        *((n, k, tokens) for n, k in ((960, 576), (8, 64)) for tokens in (1, 2, 3, 8)),
        *((5120, 2048, tokens) for tokens in (1, 2, 3, 6)),  # as many as leave room for the ring
        *((5120, 2880, tokens) for tokens in (1, 2, 3, 4)),
        *((6141, 5120, tokens) for tokens in (1, 2)),
    ],
)
def test_a_product_of_a_norm_is_that_of_the_reference(
    n: int, k: int, tokens: int, is_sum: bool
) -> None:
    wide = _random(tokens, 2 * k, dtype=torch.bfloat16, scale=3.0)
    rows, residual = wide[:, k:], torch.randn(tokens, k, device="cuda") * 5
    norm = torch.rand(k, device="cuda") + 0.5
    weight, bias = _random(n, k, dtype=wide.dtype, scale=k**-0.5), _random(n, dtype=wide.dtype)
    total = Guarded(tokens, k, dtype=torch.float32)
    x: NormedRows | SummedRows = NormedRows(rows, norm, 1e-5)
    sums = rows.float()
    if is_sum:
        x = SummedRows(rows, residual, total.tensor, norm, 1e-5)
        sums = sums + residual
    out = Guarded(tokens, n, dtype=wide.dtype)
    few_gemm.norm_linear(x, weight, bias, out=out.tensor)
    factor = (sums.double().square().mean(1, keepdim=True) + 1e-5).rsqrt()
    rounded = (sums * norm).to(wide.dtype).double()
    expected = rounded @ weight.double().T * factor + bias.double()
    assert relative_error(out.check(), expected) < ROUNDING[wide.dtype]
    if is_sum:
        assert torch.equal(total.check(), sums)


def test_a_chain_of_norms_with_dependent_launches_replays_from_a_graph() -> None:
    """As in a model whose residual stream is in float32."""
    size = 2048
    weights = [_random(size, size, dtype=torch.bfloat16, scale=size**-0.5) for _ in range(6)]
    norm = torch.ones(size, device="cuda")
    x = _random(2, size, dtype=torch.bfloat16)
    states = [x, *(torch.empty_like(x) for _ in weights)]
    first = torch.randn(2, size, device="cuda")
    totals = [first, *(torch.empty_like(first) for _ in weights)]

    def chain(pdl: bool) -> None:
        for i, weight in enumerate(weights):
            summed = SummedRows(states[i], totals[i], totals[i + 1], norm, 1e-6)
            few_gemm.norm_linear(summed, weight, out=states[i + 1], pdl=pdl)

    check_replays(chain, [x, *totals[1:], *states[1:]])
    check_replays(chain, [x, *states[1:], *totals[1:]])


def test_norms_of_other_operands_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, weight = (_random(size, 2048, dtype=torch.bfloat16) for size in (2, 5120))
    residual, total = (torch.zeros(2, 2048, device="cuda") for _ in range(2))
    x = SummedRows(rows, residual, total, torch.ones(2048, device="cuda"), 1e-6)
    out = torch.empty(2, 5120, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(ValueError, match="norm's weight"):
        few_gemm.norm_linear(x._replace(weight=x.weight.bfloat16()), weight, out=out)
    with pytest.raises(ValueError, match="total is"):
        few_gemm.norm_linear(x._replace(total=x.total[:1]), weight, out=out)
    with pytest.raises(ValueError, match="allowed: bfloat16"):
        few_gemm.norm_linear(x, weight, out=out.float())
    with pytest.raises(ValueError, match="can_norm"):
        few_gemm.norm_linear(x, weight.repeat(2, 1), out=out.repeat(1, 2))
    monkeypatch.setattr(few_gemm, "is_hopper", lambda: False)
    with pytest.raises(RuntimeError, match="Hopper"):
        few_gemm.norm_linear(x, weight, out=out)


@pytest.mark.parametrize("tokens", [1, 8, 64])
def test_results_are_bitwise_reproducible(tokens: int) -> None:
    """Blocks finish in any order; their sums are added in one."""
    x, weight = (_random(size, 4096, dtype=torch.bfloat16) for size in (tokens, 6144))
    assert plan(6144, num_multiprocessors()).pair, "no tile is shared"
    first = torch.empty(tokens, 6144, device="cuda")
    linear(x, weight, out=first)
    for _ in range(20):
        again = torch.empty_like(first)
        linear(x, weight, out=again)
        assert torch.equal(first, again)


@pytest.mark.parametrize("tokens", [4, 8, 16, 32, 64])
def test_a_broken_token_breaks_no_other(tokens: int) -> None:
    x, weight = (_random(size, 1024, dtype=torch.bfloat16) for size in (tokens, 512))
    clean, dirty = (torch.empty(tokens, 512, dtype=x.dtype, device="cuda") for _ in range(2))
    linear(x, weight, out=clean)
    x[1] = torch.nan
    linear(x, weight, out=dirty)
    assert dirty[1].isnan().all()
    others = torch.arange(tokens, device="cuda") != 1
    assert torch.equal(dirty[others], clean[others])


@pytest.mark.parametrize("tokens", [1, 7, 30])
def test_rows_of_x_can_be_strided(tokens: int) -> None:
    wide = torch.full((tokens, 3 * 576), torch.nan, dtype=torch.bfloat16, device="cuda")
    x = wide[:, 576:1152]
    x.copy_(_random(tokens, 576, dtype=torch.bfloat16))
    weight = _random(192, 576, dtype=torch.bfloat16)
    out = Guarded(tokens, 192, dtype=torch.bfloat16)
    linear(x, weight, out=out.tensor)
    assert relative_error(out.check(), x.double() @ weight.double().T) < ROUNDING[x.dtype]


@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_a_chain_with_dependent_launches_replays_from_a_graph(tokens: int) -> None:
    """Each layer's x is the layer before's out: a launch that reads too early shows."""
    size = 2048
    weights = [_random(size, size, dtype=torch.bfloat16, scale=size**-0.5) for _ in range(6)]
    x = _random(tokens, size, dtype=torch.bfloat16)
    states = [x, *(torch.empty_like(x) for _ in weights)]

    def chain(pdl: bool) -> None:
        for i, weight in enumerate(weights):
            linear(states[i], weight, out=states[i + 1], pdl=pdl)

    check_replays(chain, states)


def test_operands_that_do_not_fit_are_refused_by_name() -> None:
    x, weight = (_random(size, 64, dtype=torch.bfloat16) for size in (2, 32))
    out = torch.empty(2, 32, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(ValueError, match="out is"):
        linear(x, weight, out=out[:1])
    with pytest.raises(ValueError, match="weight"):
        linear(x, weight[:, :32], out=out)
    with pytest.raises(ValueError, match="multiple of 8"):
        linear(x[:, :60], weight[:, :60].contiguous(), out=out)
    with pytest.raises(ValueError, match="x is "):
        linear(x.float(), weight, out=out)
    with pytest.raises(ValueError, match=f"allowed: up to {MAX_TOKENS}"):
        linear(x.repeat(33, 1), weight, out=out)
    with pytest.raises(ValueError, match="gated"):
        linear(x, weight, out=out[:, :16].float(), gated=True)


def test_another_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skinny_gemm, "is_hopper", lambda: False)
    x, weight = (_random(size, 64, dtype=torch.bfloat16) for size in (2, 32))
    with pytest.raises(RuntimeError, match="Hopper"):
        linear(x, weight, out=torch.empty(2, 32, dtype=x.dtype, device="cuda"))


def test_no_tokens_are_no_launch() -> None:
    x, weight = (_random(size, 64, dtype=torch.bfloat16) for size in (0, 32))
    linear(x, weight, out=torch.empty(0, 32, dtype=x.dtype, device="cuda"))
