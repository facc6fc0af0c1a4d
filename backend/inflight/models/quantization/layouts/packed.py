"""`pack-quantized` of compressed-tensors: W4A16 and W8A16.

A weight [n, k] is weight_packed [n, k * bits / 32] int32 with codes q + 2^(bits - 1), the first in
the lowest bits; weight_scale [n, k / group], or [n, 1]; of asymmetric ones weight_zero_point
[n * bits / 32, k / group] int32, packed along n; weight_shape [2]; and with an order of columns
weight_g_idx [k], the group of each.
"""

from __future__ import annotations

from functools import partial

import torch

from inflight.checkpoint.safetensors import WEIGHTS, StoredTensor
from inflight.models.quantization.grouped import GroupedMatrix
from inflight.models.quantization.layouts.codes import (
    checked_groups,
    in_order,
    unpacked,
    with_zeros,
)
from inflight.models.quantization.layouts.layout import Layout
from inflight.models.quantization.layouts.parts import Parts, StoredMatrix
from inflight.models.quantization.matrix import Matrix

_INDEX = ("I32", "I64")


def matrices(parts: Parts, layouts: list[Layout]) -> dict[str, StoredMatrix]:
    """By the name of the weight.

    Args:
        parts: of the folder.
        layouts: of this kind; a weight's tensors decide which of them it has.

    Raises:
        ConfigError: tensors of a weight do not fit together.
    """
    return {
        f"{module}weight": _matrix(parts, f"{module}weight", layouts)
        for module in list(parts.modules("weight_packed", ("I32",)))
    }


def _matrix(parts: Parts, weight: str, layouts: list[Layout]) -> StoredMatrix:
    n, k = _shape(parts, weight)
    packed_name, scale_name = f"{weight}_packed", f"{weight}_scale"
    widths = {-(-k * bits // 32): bits for layout in layouts for bits in layout.bits}
    packed = parts.take(packed_name, ("I32",), [(n, width) for width in widths])
    bits = widths[packed.shape[1]]
    sizes = {group for layout in layouts for group in layout.group_sizes(k)}
    groups = [k // group for group in sorted(sizes) if k % group == 0]
    if not groups:
        raise parts.error(
            packed_name, f"has {k} columns", f"a multiple of {' or '.join(map(str, sizes))}"
        )
    scale = parts.take(scale_name, WEIGHTS, [(n, count) for count in groups])
    num_groups, zeros = scale.shape[1], None
    has_zeros = any(not layout.symmetric for layout in layouts)
    if parts.has(f"{weight}_zero_point") or not any(layout.symmetric for layout in layouts):
        if not has_zeros:
            raise parts.error(
                f"{weight}_zero_point", "exists", "none, as config.json says `symmetric`"
            )
        shape = (-(-n * bits // 32), num_groups)
        zeros = parts.take(f"{weight}_zero_point", ("I32",), [shape])
    order = None
    if parts.has(f"{weight}_g_idx") or all(layout.has_order for layout in layouts):
        order = parts.take(f"{weight}_g_idx", _INDEX, [(k,)])
    read = partial(_read, parts, weight, (n, k, bits), (packed, scale, zeros, order))
    return StoredMatrix((n, k), bits, k // num_groups, zeros is not None, read)


def _shape(parts: Parts, weight: str) -> tuple[int, int]:
    """Of the weight, which must be that of packed codes: nothing is allocated by it before."""
    name = f"{weight}_shape"
    n, k = parts.take(name, _INDEX, [(2,)]).read().tolist()
    if n < 1 or k < 1:
        raise parts.error(name, f"is {[n, k]}", "rows and columns")
    return n, k


def _read(
    parts: Parts,
    weight: str,
    sizes: tuple[int, int, int],
    tensors: tuple[StoredTensor, StoredTensor, StoredTensor | None, StoredTensor | None],
) -> Matrix:
    n, k, bits = sizes
    packed, scale, zeros, order = tensors
    codes = unpacked(packed.read(), bits)[:, :k].contiguous()
    scales = parts.finite(scale.read(), f"{weight}_scale")
    if zeros is None:
        matrix = GroupedMatrix(codes, bits, scales, zero=1 << (bits - 1))
    else:
        matrix = with_zeros(codes, bits, scales, unpacked(zeros.read().T, bits)[:, :n].T)
    if order is None:
        return matrix
    groups = order.read().to(torch.int64)
    if bool((groups == -1).all()):  # as models without an order were initialised
        return matrix
    return in_order(matrix, checked_groups(parts, f"{weight}_g_idx", groups, scales.shape[1]))
