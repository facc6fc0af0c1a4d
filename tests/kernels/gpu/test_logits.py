"""Scale and cap of logits against the reference in float64."""

from __future__ import annotations

import pytest
import torch

from guarded import Guarded, relative_error
from inflight_kernels.ops.logits import scale_cap
from inflight_kernels.torch_ops import transformer

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("scale", "cap"), [(0.0625, 0.0), (1.0, 30.0), (0.5, 2.0)])
@pytest.mark.parametrize("vocab_size", [1, 7, 160, 49155, 262144])
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_logits_are_scaled_and_capped(scale: float, cap: float, vocab_size: int, rows: int) -> None:
    x = Guarded(rows, vocab_size, dtype=torch.float32)
    x.tensor.copy_(torch.randn(rows, vocab_size, device="cuda") * 20)
    expected = x.tensor.double() * scale
    if cap:
        expected = transformer.soft_cap(expected, cap)
    scale_cap(x.tensor, scale, cap)
    assert relative_error(x.check(), expected) < 1e-6
