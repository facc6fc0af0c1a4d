"""Linear layers for many tokens against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from graph_replay import check_replays
from guarded import ROUNDING, Guarded, relative_error
from inflight_kernels.ops.linear.gemm import linear
from inflight_kernels.torch_ops import transformer

pytestmark = pytest.mark.gpu

DTYPE = torch.bfloat16
DTYPES = [torch.bfloat16, torch.float16]
# For each way to cut, with tiles that are full and that are not.
TOKENS = [1, 65, 127, 128, 129, 192, 193, 255, 257, 300, 1000]
# (n, k): of an 8B model, of one of 135M, and what no tile divides.
SHAPES = [(6144, 4096), (4096, 14336), (960, 576), (1000, 1288), (8, 8)]
WIDTHS = [(14336, 4096), (1536, 576), (1000, 1288), (8, 8)]


def _random(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def _float32_error(k: int) -> float:
    """Bound of `relative_error` for a product of random operands that is not rounded in the end.

    The tensor cores add 16 products at a time and cut a sum off where float32 would round it: each
    time up to 2**-23 of it is lost, half of that on average, towards zero. Over a chain of c such
    additions the sum grows as a random walk does, which makes the loss c * 2**-24 * 2/3 of the
    result at most. Sums of parts are rounded: 16 half units are plenty for them.
    """
    return (-(-k // 16) + 16) * 2.0**-24


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("tokens", TOKENS)
def test_a_product_is_that_of_the_reference(
    n: int, k: int, tokens: int, dtype: torch.dtype
) -> None:
    x, weight = _random(tokens, k, dtype=dtype), _random(n, k, scale=k**-0.5, dtype=dtype)
    expected = transformer.linear(x.double(), weight.double())
    for out_type, bound in ((dtype, ROUNDING[dtype]), (torch.float32, _float32_error(k))):
        out = Guarded(tokens, n, dtype=out_type)
        linear(x, weight, out=out.tensor)
        assert relative_error(out.check(), expected) < bound


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (1000, 1288)])
@pytest.mark.parametrize("tokens", TOKENS)
def test_bias_and_residual_are_added_before_rounding(
    tokens: int, n: int, k: int, dtype: torch.dtype
) -> None:
    x, weight = _random(tokens, k, dtype=dtype), _random(n, k, scale=k**-0.5, dtype=dtype)
    bias, residual = _random(n, dtype=dtype), _random(tokens, n, dtype=dtype)
    expected = transformer.linear(x.double(), weight.double(), bias.double()) + residual.double()
    for out_type, bound in ((torch.float32, _float32_error(k)), (dtype, ROUNDING[dtype])):
        out = Guarded(tokens, n, dtype=out_type)
        linear(x, weight, bias, residual, out=out.tensor)
        assert relative_error(out.check(), expected) < bound
    linear(x, weight, bias, residual, out=residual)
    assert torch.equal(residual, out.tensor), "the result may lie where the residual was"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "k"), WIDTHS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_a_gated_product_is_silu_of_one_half_times_the_other(
    tokens: int, width: int, k: int, dtype: torch.dtype
) -> None:
    x, weight = _random(tokens, k, dtype=dtype), _random(2 * width, k, scale=k**-0.5, dtype=dtype)
    bias, residual = _random(2 * width, dtype=dtype), _random(tokens, width, dtype=dtype)
    gate, up = F.linear(x.double(), weight.double()).chunk(2, -1)
    out = Guarded(tokens, width, dtype=dtype)
    linear(x, weight, out=out.tensor, gated=True)
    assert relative_error(out.check(), F.silu(gate) * up) < ROUNDING[dtype]
    gate, up = gate + bias[:width].double(), up + bias[width:].double()
    linear(x, weight, bias, residual, out=out.tensor, gated=True)
    expected = F.silu(gate) * up + residual.double()
    assert relative_error(out.check(), expected) < ROUNDING[dtype]
    linear(x, weight, bias, residual, out=residual, gated=True)
    assert torch.equal(residual, out.tensor), "the result may lie where the residual was"


@pytest.mark.parametrize("gated", [False, True])
def test_more_tiles_than_are_walked_over_together(gated: bool) -> None:
    """Several groups of tiles along the tokens, the last of them smaller."""
    tokens, n, k = 8192 - 101, 3072, 512
    x, weight = _random(tokens, k), _random(n, k, scale=k**-0.5)
    out = Guarded(tokens, n // 2 if gated else n, dtype=DTYPE)
    linear(x, weight, out=out.tensor, gated=gated)
    expected = x.double() @ weight.double().T
    if gated:
        gate, up = expected.chunk(2, -1)
        expected = F.silu(gate) * up
    assert relative_error(out.check(), expected) < ROUNDING[DTYPE]


@pytest.mark.parametrize("tokens", [65, 150])
def test_a_gate_may_be_far_below_zero(tokens: int) -> None:
    """exp of its negative overflows: silu is 0 there, not NaN."""
    x = torch.zeros(tokens, 64, dtype=DTYPE, device="cuda")
    x[:, 0] = torch.linspace(-1000, 1000, tokens)
    weight = torch.zeros(16, 64, dtype=DTYPE, device="cuda")
    weight[:, 0] = 1
    out = Guarded(tokens, 8, dtype=DTYPE)
    linear(x, weight, out=out.tensor, gated=True)
    gate = x[:, :1].double().expand(-1, 8)
    assert relative_error(out.check(), F.silu(gate) * gate) < ROUNDING[DTYPE]
    assert not out.tensor[0].any()


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("tokens", [100, 150, 256])
def test_results_are_bitwise_reproducible(tokens: int, gated: bool) -> None:
    x, weight = _random(tokens, 4096), _random(4096, 4096)
    width = 2048 if gated else 4096
    first, again = (torch.empty(tokens, width, dtype=DTYPE, device="cuda") for _ in range(2))
    linear(x, weight, out=first, gated=gated)
    for _ in range(20):
        again.fill_(torch.nan)
        linear(x, weight, out=again, gated=gated)
        assert torch.equal(first, again)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("tokens", [65, 128, 150, 300])
def test_a_broken_token_breaks_no_other(tokens: int, gated: bool) -> None:
    x, weight = _random(tokens, 1024), _random(512, 1024)
    width = 256 if gated else 512
    clean, dirty = (torch.empty(tokens, width, dtype=x.dtype, device="cuda") for _ in range(2))
    linear(x, weight, out=clean, gated=gated)
    x[1] = torch.nan
    linear(x, weight, out=dirty, gated=gated)
    assert dirty[1].isnan().all()
    others = torch.arange(tokens, device="cuda") != 1
    assert torch.equal(dirty[others], clean[others])


@pytest.mark.parametrize("tokens", [70, 150, 200])
def test_rows_of_x_can_be_strided(tokens: int) -> None:
    wide = torch.full((tokens, 3 * 576), torch.nan, dtype=DTYPE, device="cuda")
    x = wide[:, 576:1152]
    x.copy_(_random(tokens, 576))
    weight = _random(192, 576)
    out = Guarded(tokens, 192, dtype=DTYPE)
    linear(x, weight, out=out.tensor)
    assert relative_error(out.check(), x.double() @ weight.double().T) < ROUNDING[x.dtype]


@pytest.mark.parametrize("tokens", [65, 150, 256, 600])
def test_a_chain_with_dependent_launches_replays_from_a_graph(tokens: int) -> None:
    """Each layer's x is the layer before's out: a launch that reads too early shows."""
    size = 2048
    weights = [_random(2 * size, size, scale=size**-0.5) for _ in range(6)]
    x = _random(tokens, size)
    states = [x, *(torch.empty_like(x) for _ in weights)]

    def chain(pdl: bool) -> None:
        for i, weight in enumerate(weights):
            linear(states[i], weight, residual=states[i], out=states[i + 1], gated=True, pdl=pdl)
            linear(states[i], weight[:size], residual=states[i + 1], out=states[i + 1], pdl=pdl)

    check_replays(chain, states)


def test_operands_that_do_not_fit_are_refused_by_name() -> None:
    x, weight = _random(65, 64), _random(32, 64)
    out = torch.empty(65, 32, dtype=DTYPE, device="cuda")
    with pytest.raises(ValueError, match="out is"):
        linear(x, weight, out=out[:1])
    with pytest.raises(ValueError, match="weight"):
        linear(x, weight[:, :32], out=out)
    with pytest.raises(ValueError, match="multiple of 8"):
        linear(x[:, :60], weight[:, :60].contiguous(), out=out)
    with pytest.raises(ValueError, match="multiple of 8"):
        linear(x, weight[:8], out=out[:, :4].contiguous(), gated=True)
    with pytest.raises(ValueError, match="x is "):
        linear(x.float(), weight, out=out)
    with pytest.raises(ValueError, match="strides"):
        linear(x.T.contiguous().T, weight, out=out)
    with pytest.raises(ValueError, match="gated"):
        linear(x, weight, out=out[:, :16].float(), gated=True)


def test_no_tokens_are_no_launch() -> None:
    x, weight = _random(0, 64), _random(32, 64)
    linear(x, weight, out=torch.empty(0, 32, dtype=x.dtype, device="cuda"))
