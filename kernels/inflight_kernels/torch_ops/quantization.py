"""Products of 8-bit values in torch: the reference implementation, and the one for `device: cpu`.

Shapes: n rows of activations [n, k], weights [m, k] as in checkpoints. A matrix is quantised by
rows: 8-bit values of one type, times one float32 scale for each row.

An INT8 row has one step for all of its values, which the largest one sets. Activations have a few
large columns, so before they are rounded, rows may be spread: blocks of columns are Hadamard
transformed, of the weight as of its inputs (QuaRot, arXiv:2404.00456), which leaves their products
as they are. e4m3 has steps for each value by itself, and gains nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inflight_kernels.torch_ops.kv_quantization import LARGEST, butterflies
from inflight_kernels.torch_ops.transformer import linear

_SMALLEST_AMAX = 1e-12  # rows of zeros have a scale too, and their quotients are not NaN

MIN_SPREAD, MAX_SPREAD = 16, 64
"""Columns of the blocks in which rows are spread, a power of two. Larger ones would gain little,
and exchange values between more threads of a GPU."""


def spread_block(width: int) -> int:
    """Columns of the blocks in which rows of so many are spread: the largest power of two up to
    MAX_SPREAD that divides the width; 0, for rows that stay as they are, below MIN_SPREAD."""
    block = min(width & -width, MAX_SPREAD)
    return block if block >= MIN_SPREAD else 0


def spread_inputs(x: Tensor, block: int) -> Tensor:
    """Inputs [..., k] of a weight of `spread_weight`, which it reverses as well.

    Args:
        x: of any float type.
        block: columns of a block, a power of two that divides k; 0 for x as it is.

    Returns:
        [..., k] in float32 or float64; x itself if it is not spread.
    """
    return _spread(x, block, _bits(block) // 2) if block else x


def spread_weight(weight: Tensor, block: int) -> Tensor:
    """A weight [..., k] whose products with `spread_inputs` are those of before.

    Unscaled, the transforms would multiply them by the number of columns of a block; each side
    takes about half of that power of two off, which loses no bit.
    """
    return _spread(weight, block, _bits(block) - _bits(block) // 2) if block else weight


def _bits(block: int) -> int:
    """Log 2 of the columns of a block."""
    return block.bit_length() - 1


def _spread(x: Tensor, block: int, bits: int) -> Tensor:
    """Hadamard transforms of blocks of columns, times 2^-bits.

    Butterflies of columns that are 1, 2, 4 and so on apart, in the order of eight_bit.cuh. Each is
    computed by itself, so that rows do not depend on each other.
    """
    shape = x.shape
    x = x if x.dtype == torch.float64 else x.to(torch.float32)
    for distance in (1 << bit for bit in range(_bits(block))):
        x = butterflies(x.reshape(-1, 2, distance))
    return x.view(shape) * 2.0**-bits


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
    spread: int = 0,
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
        spread: columns of the blocks in which the weight was spread, as x then is; 0 for none.

    Returns:
        [n, m] of x's type.
    """
    rows, row_scales = quantize_rows(spread_inputs(x, spread), dtype or values.dtype)
    weight = values if values.dtype == torch.float32 else values.to(torch.float32)
    product = linear(rows.to(torch.float32), weight)
    out = product.mul_(row_scales[:, None]).mul_(scales)
    return (out if bias is None else out.add_(bias)).to(x.dtype)
