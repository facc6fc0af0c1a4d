"""Linear layers with weights of 8 bits and x of 16, against float64 of the dequantised weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from graph_replay import check_replays
from guarded import ROUNDING, Guarded, relative_error
from inflight_kernels.ops.linear import weight_only
from inflight_kernels.ops.linear.scaled_rows import ScaledRows
from inflight_kernels.ops.linear.weight_only import dequantize, linear
from inflight_kernels.torch_ops.quantization import dequantize_rows, quantize_rows

pytestmark = pytest.mark.gpu

TOKENS = [1, 2, 7, 8, 9, 16, 33, 64]
SHAPES = [(6144, 4096), (4096, 14336), (576, 1536), (1005, 1296), (124, 16), (128, 48)]
bytes_ = pytest.mark.parametrize("byte", [torch.float8_e4m3fn, torch.int8], ids=str)
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def _random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def _quantized(rows: int, width: int, byte: torch.dtype) -> ScaledRows:
    """Rows of different magnitudes, within memory that has values which must not be read."""
    factors = torch.linspace(0.5, 2, rows, device="cuda")[:, None] * width**-0.5
    found, scales = quantize_rows(torch.randn(rows, width, device="cuda") * factors, byte)
    memory = torch.full(((rows + 64) * width,), 127, dtype=torch.uint8, device="cuda")
    values = memory[32 * width : (32 + rows) * width].view(byte).view(rows, width)
    return ScaledRows(values.copy_(found), scales)


def _product(x: torch.Tensor, weight: ScaledRows) -> torch.Tensor:
    return x.double() @ (weight.values.double() * weight.scales.double()[:, None]).T


@dtypes
@bytes_
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("tokens", TOKENS)
def test_a_product_is_that_of_the_dequantised_weight(
    n: int, k: int, tokens: int, byte: torch.dtype, dtype: torch.dtype
) -> None:
    x, weight = _random(tokens, k, dtype=dtype), _quantized(n, k, byte)
    bias, residual = _random(n, dtype=dtype), _random(tokens, n, dtype=dtype)
    expected = _product(x, weight)
    out, both = (Guarded(tokens, n, dtype=dtype) for _ in range(2))
    linear(x, weight, out=out.tensor)
    assert relative_error(out.check(), expected) < ROUNDING[dtype]
    linear(x, weight, bias, residual, out=both.tensor)
    expected += bias.double() + residual.double()
    assert relative_error(both.check(), expected) < ROUNDING[dtype]
    linear(x, weight, bias, residual, out=residual)
    assert torch.equal(residual, both.tensor), "the result may lie where the residual was"


@dtypes
@bytes_
@pytest.mark.parametrize(("width", "k"), [(14336, 4096), (1536, 576), (1005, 1296), (61, 16)])
@pytest.mark.parametrize("tokens", TOKENS)
def test_a_gated_product_is_silu_of_one_half_times_the_other(
    width: int, k: int, tokens: int, byte: torch.dtype, dtype: torch.dtype
) -> None:
    x, weight = _random(tokens, k, dtype=dtype), _quantized(2 * width, k, byte)
    bias, residual = _random(2 * width, dtype=dtype), _random(tokens, width, dtype=dtype)
    out = Guarded(tokens, width, dtype=dtype)
    linear(x, weight, bias, residual, out=out.tensor, gated=True)
    gate, up = (_product(x, weight) + bias.double()).chunk(2, -1)
    expected = F.silu(gate) * up + residual.double()
    assert relative_error(out.check(), expected) < ROUNDING[dtype]


@dtypes
@bytes_
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("tile", [one for ones in weight_only._TILES for one in ones], ids=str)
def test_tiles_of_every_size_come_to_the_same(
    monkeypatch: pytest.MonkeyPatch,
    tile: weight_only.Tile,
    gated: bool,
    byte: torch.dtype,
    dtype: torch.dtype,
) -> None:
    """The last tile, the last columns and the last tokens are not whole."""
    monkeypatch.setattr(weight_only, "plan", lambda *shape: tile)
    tokens, n, k = tile.tokens - 3, 5 * tile.rows - 6, 1296
    x, weight = _random(tokens, k, dtype=dtype), _quantized(n, k, byte)
    expected = _product(x, weight)
    if gated:
        gate, up = expected.chunk(2, -1)
        expected = F.silu(gate) * up
    out = Guarded(*expected.shape, dtype=dtype)
    linear(x, weight, out=out.tensor, gated=gated)
    assert relative_error(out.check(), expected) < ROUNDING[dtype]


@bytes_
@pytest.mark.parametrize("tokens", [1, 8, 64])
def test_products_of_every_byte_are_exact(tokens: int, byte: torch.dtype) -> None:
    """Row i of the weight has the byte i in one column; x has small powers of two."""
    codes = torch.arange(256, device="cuda")
    if byte == torch.float8_e4m3fn:
        codes = codes[codes % 128 != 127]
    values = torch.zeros(len(codes), 256, dtype=torch.uint8, device="cuda")
    columns = torch.arange(len(codes), device="cuda") * 37 % 256
    values[torch.arange(len(codes), device="cuda"), columns] = codes.to(torch.uint8)
    weight = ScaledRows(values.view(byte), torch.full((len(codes),), 0.25, device="cuda"))
    x = torch.full((tokens, 256), 2.0, dtype=torch.bfloat16, device="cuda")
    out = Guarded(tokens, len(codes), dtype=torch.bfloat16)
    linear(x, weight, out=out.tensor)
    assert torch.equal(out.check(), _product(x, weight).to(torch.bfloat16))


@bytes_
@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_results_are_bitwise_reproducible(tokens: int, byte: torch.dtype) -> None:
    x, weight = _random(tokens, 4096, dtype=torch.bfloat16), _quantized(6144, 4096, byte)
    first, again = (torch.empty(tokens, 6144, dtype=x.dtype, device="cuda") for _ in range(2))
    linear(x, weight, out=first)
    for _ in range(20):
        again.fill_(torch.nan)
        linear(x, weight, out=again)
        assert torch.equal(first, again)


@pytest.mark.parametrize("tokens", [4, 16, 32, 64])
def test_a_broken_token_breaks_no_other(tokens: int) -> None:
    x, weight = _random(tokens, 1024, dtype=torch.bfloat16), _quantized(512, 1024, torch.int8)
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
    x.copy_(_random(tokens, 576, dtype=x.dtype))
    weight = _quantized(192, 576, torch.float8_e4m3fn)
    out = Guarded(tokens, 192, dtype=x.dtype)
    linear(x, weight, out=out.tensor)
    assert relative_error(out.check(), _product(x, weight)) < ROUNDING[x.dtype]


@bytes_
@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_a_chain_with_dependent_launches_replays_from_a_graph(
    tokens: int, byte: torch.dtype
) -> None:
    """Each layer's x is the layer before's out: a launch that reads too early shows."""
    size = 2048
    weights = [_quantized(size, size, byte) for _ in range(6)]
    x = _random(tokens, size, dtype=torch.bfloat16)
    states = [x, *(torch.empty_like(x) for _ in weights)]

    def chain(pdl: bool) -> None:
        for i, weight in enumerate(weights):
            linear(states[i], weight, out=states[i + 1], pdl=pdl)

    check_replays(chain, states)


@dtypes
@bytes_
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_dequantised_weight_is_that_of_torch(
    n: int, k: int, byte: torch.dtype, dtype: torch.dtype
) -> None:
    weight = _quantized(n, k, byte)
    out = Guarded(n, k, dtype=dtype)
    dequantize(weight, out=out.tensor)
    assert torch.equal(out.check(), dequantize_rows(weight.values, weight.scales).to(dtype))


def test_no_tokens_are_no_launch() -> None:
    x, weight = _random(0, 64, dtype=torch.bfloat16), _quantized(32, 64, torch.int8)
    linear(x, weight, out=torch.empty(0, 32, dtype=x.dtype, device="cuda"))
