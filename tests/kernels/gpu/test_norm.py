"""RMSNorm against the reference in float64."""

from __future__ import annotations

import pytest
import torch

from guarded import ROUNDING, Guarded, relative_error
from inflight_kernels.ops.linear.scaled_rows import ScaledRows
from inflight_kernels.ops.norm import rms_norm
from inflight_kernels.torch_ops import transformer

pytestmark = pytest.mark.gpu

EPS = 1e-5
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def _random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [8, 64, 576, 2048, 4096, 4104, 5120, 8192, 14336, 16384])
@pytest.mark.parametrize("rows", [1, 3, 257, 1100])
def test_a_norm_is_that_of_the_reference(dtype: torch.dtype, hidden: int, rows: int) -> None:
    x = _random(rows, hidden, dtype=dtype, scale=3.0)
    weight = _random(hidden, dtype=torch.float32)
    out = Guarded(rows, hidden, dtype=dtype)
    rms_norm(x, weight, EPS, out=out.tensor)
    expected, _ = transformer.rms_norm(x.double(), weight.double(), EPS)
    assert relative_error(out.check(), expected) < ROUNDING[dtype]


@pytest.mark.parametrize("hidden", [8, 64, 576, 3584, 4096, 4104, 8192, 16384])
@pytest.mark.parametrize("values", [None, torch.float8_e4m3fn, torch.int8], ids=str)
def test_a_row_is_normed_alone_as_among_many(hidden: int, values: torch.dtype | None) -> None:
    """By other numbers of threads, which add the same sums in the same order."""
    if values is not None and hidden % 16:
        hidden += 8
    x = _random(2048, hidden, dtype=torch.bfloat16, scale=3.0)
    weight = _random(hidden, dtype=torch.float32)

    def normed(rows: torch.Tensor) -> list[torch.Tensor]:
        if values is None:
            out = torch.empty_like(rows)
            rms_norm(rows, weight, EPS, out=out)
            return [out]
        scaled = ScaledRows.empty(*rows.shape, "cuda", values)
        rms_norm(rows, weight, EPS, out=scaled)
        return [scaled.values.view(torch.uint8), scaled.scales]

    many = normed(x)
    for first, last in ((0, 1), (5, 8), (1000, 1200), (2047, 2048)):
        for got, expected in zip(normed(x[first:last]), many, strict=True):
            assert torch.equal(got, expected[first:last])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [8, 576, 4096, 8192, 16384])
@pytest.mark.parametrize("rows", [1, 3, 257])
def test_the_sum_is_rounded_once_and_then_normalised(
    dtype: torch.dtype, hidden: int, rows: int
) -> None:
    x = _random(rows, hidden, dtype=dtype)
    residual = _random(rows, hidden, dtype=dtype, scale=10.0)
    weight = _random(hidden, dtype=torch.float32)
    out, total = Guarded(rows, hidden, dtype=dtype), Guarded(rows, hidden, dtype=dtype)
    rms_norm(x, weight, EPS, residual, out=out.tensor, total=total.tensor)
    assert torch.equal(total.check(), (x.float() + residual.float()).to(dtype))
    expected, _ = transformer.rms_norm(total.tensor.double(), weight.double(), EPS)
    assert relative_error(out.check(), expected) < ROUNDING[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("hidden", [8, 576, 2048, 4104, 8192, 16384])
@pytest.mark.parametrize("rows", [1, 3, 257])
def test_a_sum_in_float32_is_not_rounded(dtype: torch.dtype, hidden: int, rows: int) -> None:
    x = _random(rows, hidden, dtype=dtype)
    residual = _random(rows, hidden, dtype=torch.float32, scale=10.0)
    weight = _random(hidden, dtype=torch.float32)
    out, total = Guarded(rows, hidden, dtype=dtype), Guarded(rows, hidden, dtype=torch.float32)
    rms_norm(x, weight, EPS, residual, out=out.tensor, total=total.tensor)
    assert torch.equal(total.check(), x.float() + residual)
    expected, _ = transformer.rms_norm(total.tensor.double(), weight.double(), EPS)
    assert relative_error(out.check(), expected) < ROUNDING[dtype]
    rms_norm(x, weight, EPS, residual, out=x, total=residual)
    assert torch.equal(x, out.tensor)
    assert torch.equal(residual, total.tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("hidden", [8, 576, 2048, 4104, 8192, 16384])
@pytest.mark.parametrize("rows", [1, 3, 257])
def test_the_first_sum_in_float32_is_x(dtype: torch.dtype, hidden: int, rows: int) -> None:
    x = _random(rows, hidden, dtype=dtype, scale=3.0)
    weight = _random(hidden, dtype=torch.float32)
    out, total = Guarded(rows, hidden, dtype=dtype), Guarded(rows, hidden, dtype=torch.float32)
    plain = torch.empty_like(x)
    rms_norm(x, weight, EPS, out=out.tensor, total=total.tensor)
    rms_norm(x, weight, EPS, out=plain)
    assert torch.equal(total.check(), x.float())
    assert torch.equal(out.check(), plain)


@pytest.mark.parametrize("hidden", [4096, 16384])
def test_results_may_lie_where_the_operands_were(hidden: int) -> None:
    x, residual = (_random(70, hidden, dtype=torch.bfloat16) for _ in range(2))
    weight = _random(hidden, dtype=torch.float32)
    out, total = torch.empty_like(x), torch.empty_like(x)
    rms_norm(x, weight, EPS, residual, out=out, total=total)
    rms_norm(x, weight, EPS, residual, out=x, total=residual)
    assert torch.equal(x, out)
    assert torch.equal(residual, total)


def test_small_and_large_rows_keep_their_scale() -> None:
    """The mean of squares neither overflows half nor vanishes next to eps."""
    x = torch.full((2, 4096), 60000.0, dtype=torch.float16, device="cuda")
    x[1] = 6e-5
    weight = torch.ones(4096, device="cuda")
    out = torch.empty_like(x)
    rms_norm(x, weight, 1e-12, out=out)
    expected, _ = transformer.rms_norm(x.double(), weight.double(), 1e-12)
    assert relative_error(out[0], expected[0]) < 1e-3
    assert relative_error(out[1], expected[1]) < 1e-3


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    x = _random(33, 4096, dtype=torch.bfloat16)
    weight = _random(4096, dtype=torch.float32)
    together, alone = torch.empty_like(x), torch.empty_like(x[:1])
    rms_norm(x, weight, EPS, out=together)
    rms_norm(x[20:21], weight, EPS, out=alone)
    assert torch.equal(together[20:21], alone)


def test_no_rows_are_no_launch() -> None:
    x = torch.empty(0, 4096, dtype=torch.bfloat16, device="cuda")
    rms_norm(x, torch.ones(4096, device="cuda"), EPS, out=torch.empty_like(x))


def test_total_and_out_need_memory_of_their_own() -> None:
    x = _random(2, 64, dtype=torch.float32)
    with pytest.raises(ValueError, match="must not share memory"):
        rms_norm(x, x[0], EPS, x, out=x, total=x)
    with pytest.raises(ValueError, match="must be given together"):
        rms_norm(x, x[0], EPS, x, out=torch.empty_like(x))


def test_the_residual_has_the_type_of_the_total() -> None:
    x = _random(2, 64, dtype=torch.bfloat16)
    for kind, other in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        total, residual = torch.empty_like(x, dtype=kind), torch.zeros_like(x, dtype=other)
        with pytest.raises(ValueError, match=f"residual is {other}"):
            rms_norm(x, x[0].float(), EPS, residual, out=torch.empty_like(x), total=total)
    with pytest.raises(ValueError, match=r"total is torch.float16"):
        rms_norm(x, x[0].float(), EPS, out=torch.empty_like(x), total=torch.empty_like(x).half())


def test_a_wide_row_that_no_block_holds_is_refused() -> None:
    x = _random(1, 16392, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="65568 bytes"):
        rms_norm(x, x[0].float(), EPS, out=torch.empty_like(x), total=torch.empty_like(x).float())
