"""Activations of an MLP against the reference in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from guarded import ROUNDING, Guarded, relative_error
from inflight_kernels.ops.activation import gelu_tanh, gelu_tanh_mul, relu2, silu_mul
from inflight_kernels.torch_ops import transformer

pytestmark = pytest.mark.gpu

Op = Callable[..., None]
Reference = Callable[[torch.Tensor], torch.Tensor]
GATES = [
    pytest.param(silu_mul, transformer.silu_mul, id="silu_mul"),
    pytest.param(gelu_tanh_mul, transformer.gelu_tanh_mul, id="gelu_tanh_mul"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [8, 1536, 14336, 28672])
@pytest.mark.parametrize("rows", [1, 7, 300])
@pytest.mark.parametrize(("op", "reference"), GATES)
def test_a_gate_is_that_of_the_reference(
    op: Op, reference: Reference, dtype: torch.dtype, width: int, rows: int
) -> None:
    x = (torch.randn(rows, 2 * width, device="cuda") * 4).to(dtype)
    out = Guarded(rows, width, dtype=dtype)
    op(x, out=out.tensor)
    assert relative_error(out.check(), reference(x.double())) < ROUNDING[dtype]


@pytest.mark.parametrize(("op", "reference"), GATES)
def test_gates_far_from_zero_are_closed_or_open(op: Op, reference: Reference) -> None:
    gate = torch.tensor([-1e30, -200.0, -88.0, 0.0, 88.0, 200.0, 1e30, 3.0], device="cuda")
    out = torch.empty(1, 8, device="cuda")
    op(torch.cat((gate, torch.full_like(gate, 2.0))).unsqueeze(0), out=out)
    wanted = torch.where(gate > 0, 2 * gate, 0.0)
    wanted[7] = reference(torch.tensor([[3.0, 2.0]]))[0, 0]
    assert torch.allclose(out[0], wanted, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize(("op", "reference"), GATES)
def test_nan_is_preserved(op: Op, reference: Reference) -> None:
    x = torch.ones(1, 16, device="cuda")
    x[0, 1], x[0, 10] = torch.nan, torch.nan
    out = torch.empty(1, 8, device="cuda")
    op(x, out=out)
    assert out[0].isnan().nonzero().flatten().tolist() == [1, 2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [64, 1536, 12288])
@pytest.mark.parametrize("rows", [1, 7, 300])
@pytest.mark.parametrize(
    ("op", "reference"),
    [
        pytest.param(gelu_tanh, transformer.gelu_tanh, id="gelu_tanh"),
        pytest.param(relu2, transformer.relu2, id="relu2"),
    ],
)
def test_an_activation_without_a_gate_is_that_of_the_reference(
    op: Op, reference: Reference, dtype: torch.dtype, width: int, rows: int
) -> None:
    x = (torch.randn(rows, width, device="cuda") * 4).to(dtype)
    out = Guarded(rows, width, dtype=dtype)
    op(x, out=out.tensor)
    assert relative_error(out.check(), reference(x.double())) < ROUNDING[dtype]
    op(x, out=x)
    assert torch.equal(x, out.tensor)
