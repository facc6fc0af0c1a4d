"""Norms of the residual stream against the reference in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from guarded import ROUNDING, Guarded, relative_error
from inflight_kernels.ops.residual_norm import Addend, Affine, NormParams, add_norm, norm_columns
from inflight_kernels.torch_ops import transformer

pytestmark = pytest.mark.gpu

EPS = 1e-5
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def _random(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def _affine(hidden: int, has_bias: bool) -> Affine:
    return Affine(_random(hidden), _random(hidden) if has_bias else None)


def _normed(x: Tensor, affine: Affine | None, centered: bool) -> Tensor:
    if affine is None:
        return x
    weight = affine.weight.double()
    if not centered:
        return transformer.rms_norm(x, weight, EPS)[0]
    bias = None if affine.bias is None else affine.bias.double()
    return transformer.layer_norm(x, weight, bias, EPS)[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [8, 640, 2304, 4104, 5376, 16384])
@pytest.mark.parametrize("rows", [1, 3, 257])
@pytest.mark.parametrize(
    ("has_norm", "has_post_norm", "centered", "has_bias", "is_new"),
    [
        (True, True, False, False, False),
        (True, False, False, False, True),
        (False, True, False, False, False),
        (False, False, False, False, True),
        (True, False, True, True, False),
        (True, True, True, False, False),
    ],
    ids=["sandwich", "first", "post", "first without norm", "layer norm", "layer norms"],
)
def test_the_stream_and_its_norm_are_those_of_the_reference(
    dtype: torch.dtype,
    hidden: int,
    rows: int,
    has_norm: bool,
    has_post_norm: bool,
    centered: bool,
    has_bias: bool,
    is_new: bool,
) -> None:
    x = _random(rows, hidden, dtype=dtype, scale=3.0)
    earlier = _random(rows, hidden, scale=10.0)
    norm = _affine(hidden, has_bias) if has_norm else None
    post_norm = _affine(hidden, has_bias) if has_post_norm else None
    out, total = Guarded(rows, hidden, dtype=dtype), Guarded(rows, hidden, dtype=torch.float32)
    total.tensor.copy_(torch.nan if is_new else earlier)
    addend = Addend(x, post_norm, scale=0.22)
    params = NormParams(EPS, centered)
    add_norm(addend, total.tensor, params, out=out.tensor, norm=norm, is_new=is_new)

    added = 0.22 * _normed(x.double(), post_norm, centered)
    expected = added if is_new else added + earlier.double()
    assert relative_error(total.check(), expected) < ROUNDING[torch.float32]
    assert relative_error(out.check(), _normed(expected, norm, centered)) < ROUNDING[dtype]
    # In place: the norm takes the place of what was added.
    total.tensor.copy_(torch.nan if is_new else earlier)
    add_norm(addend, total.tensor, params, out=x, norm=norm, is_new=is_new)
    assert torch.equal(x, out.tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("first", "width"), [(0, 8), (64, 128), (4096, 1024), (0, 16384)])
@pytest.mark.parametrize("rows", [1, 3, 257])
def test_columns_are_normed_in_place_and_no_others(
    dtype: torch.dtype, first: int, width: int, rows: int
) -> None:
    stride = first + width + 64
    x = _random(rows, stride, dtype=dtype, scale=3.0)
    before = x.clone()
    weight = _random(width)
    norm_columns(x, first, weight, EPS)
    columns = slice(first, first + width)
    expected, _ = transformer.rms_norm(before[:, columns].double(), weight.double(), EPS)
    assert relative_error(x[:, columns], expected) < ROUNDING[dtype]
    x[:, columns] = before[:, columns]
    assert torch.equal(x, before)
