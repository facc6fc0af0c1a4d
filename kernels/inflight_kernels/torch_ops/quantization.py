"""Products of 8-bit values in torch: the reference implementation, and the one for `device: cpu`.

Shapes: n rows of activations [n, k], weights [m, k] as in checkpoints. A matrix is quantised by
rows: 8-bit values of one type, times one float32 scale for each row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inflight_kernels.torch_ops.kv_quantization import LARGEST
from inflight_kernels.torch_ops.transformer import linear

_SMALLEST_AMAX = 1e-12  # rows of zeros have a scale too, and their quotients are not NaN


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantise each row by its largest magnitude.

    A row's scale is its largest magnitude (at least 1e-12) / LARGEST[dtype]; its values are its
    elements / scale, to the nearest value, ties to even. A row that contains NaN or infinity has
    values of 0 and a scale of NaN, so that products with it are NaN.

    Args:
        x: [n, k] of any float type.
        dtype: of the values: torch.float8_e4m3fn or torch.int8.

    Returns:
        (values [n, k] of dtype, scales [n] float32).
    """
    wide, largest = x.to(torch.float32), LARGEST[dtype]
    scales = wide.abs().amax(1, keepdim=True).clamp_(min=_SMALLEST_AMAX) / largest
    # inf - inf and NaN - NaN are NaN; what is finite stays as it is.
    scales = scales + (scales - scales)
    values = torch.where(scales.isnan(), 0.0, wide / scales)
    if not dtype.is_floating_point:
        values = values.round_()
    return values.clamp_(-largest, largest).to(dtype), scales.squeeze(1)


def dequantize_rows(values: Tensor, scales: Tensor) -> Tensor:
    """values [n, k] times the scale of each row [n] -> [n, k] float32."""
    return values.to(torch.float32).mul_(scales[:, None])


def quantized_linear(
    x: Tensor,
    values: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """x @ weight.T + bias, x quantised by rows to the type of the weight (W8A8).

    The products of the quantised values are summed in float32, multiplied by the row's scale, then
    by the weight's, and the bias is added in float32. A row's result does not depend on the others.

    Args:
        x: [n, k] of any float type.
        values: [m, k] of the weight, 8 bits each; or the same values in float32, which may be
            packed (`transformer.pack`).
        scales: [m] float32.
        bias: [m]; None for zero.
        dtype: to which x is quantised; None for that of the values, unless they are in float32.

    Returns:
        [n, m] of x's type.
    """
    rows, row_scales = quantize_rows(x, dtype or values.dtype)
    weight = values if values.dtype == torch.float32 else values.to(torch.float32)
    product = linear(rows.to(torch.float32), weight)
    out = product.mul_(row_scales[:, None]).mul_(scales)
    return (out if bias is None else out.add_(bias)).to(x.dtype)
