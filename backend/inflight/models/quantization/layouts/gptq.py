"""GPTQ: 4 and 8 bits, of AutoGPTQ, GPTQModel and AutoRound.

A weight [n, k] is qweight [k * bits / 32, n] int32, packed along k, the first code in the lowest
bits; qzeros [k / group, n * bits / 32] int32, packed along n; scales [k / group, n]; and g_idx [k]
int32, the group of each column. With desc_act columns of a group are anywhere.

The first version of the format stores zeros less 1, `gptq_v2` zeros. GPTQModel's later versions
write the latter's zeros under the former's name if the format is symmetric
(github.com/vllm-project/vllm/pull/38966), so for those values decide: 7 and 8 are both 8.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

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


def matrices(parts: Parts, layouts: list[Layout]) -> dict[str, StoredMatrix]:
    """By the name of the weight.

    Args:
        parts: of the folder.
        layouts: one of this kind.

    Raises:
        ConfigError: tensors of a weight do not fit together.
    """
    (layout,) = layouts
    return {
        f"{module}weight": _matrix(parts, module, layout)
        for module in list(parts.modules("qweight", ("I32",)))
    }


def _matrix(parts: Parts, module: str, layout: Layout) -> StoredMatrix:
    name = f"{module}qweight"
    packed = parts.take(name, ("I32",))
    if len(packed.shape) != 2 or 0 in packed.shape:
        raise parts.error(name, f"has the shape {list(packed.shape)}", "a matrix")
    num_words, n = packed.shape
    order = None
    bits = max(layout.bits)
    k = num_words * 32 // bits
    if parts.has(f"{module}g_idx") or layout.has_order or len(layout.bits) > 1:
        widths = {num_words * 32 // bits: bits for bits in layout.bits}
        order = parts.take(f"{module}g_idx", ("I32", "I64"), [(width,) for width in widths])
        k = order.shape[0]
        bits = widths[k]
    # Groups at the end may be smaller.
    sizes = {-(-k // group): min(group, k) for group in layout.group_sizes(k)}
    scales = parts.take(f"{module}scales", WEIGHTS, [(count, n) for count in sizes])
    num_groups = scales.shape[0]
    zeros = parts.take(f"{module}qzeros", ("I32",), [(num_groups, -(-n * bits // 32))])
    bits_and_group = (bits, sizes[num_groups])
    read = partial(_read, parts, module, layout, bits_and_group, (packed, zeros, scales, order))
    return StoredMatrix((n, k), *bits_and_group, not layout.symmetric, read)


def _read(
    parts: Parts,
    module: str,
    layout: Layout,
    bits_and_group: tuple[int, int],
    tensors: tuple[StoredTensor, StoredTensor, StoredTensor, StoredTensor | None],
) -> Matrix:
    bits, group = bits_and_group
    packed, stored_zeros, stored_scales, order = tensors
    codes = unpacked(packed.read().T, bits)
    scales = parts.finite(stored_scales.read(), f"{module}scales").T.contiguous()
    n, num_groups = scales.shape
    zeros = _zeros(stored_zeros.read(), n, bits, layout)
    if zeros is None:
        matrix = GroupedMatrix(codes, bits, scales, zero=1 << (bits - 1))
    else:
        matrix = with_zeros(codes, bits, scales, zeros.T)
    if order is not None:
        groups = order.read().to(torch.int64)
        return in_order(matrix, checked_groups(parts, f"{module}g_idx", groups, num_groups))
    return in_order(matrix, torch.arange(codes.shape[1]) // group)


def _zeros(packed: Tensor, n: int, bits: int, layout: Layout) -> Tensor | None:
    """[groups, n]; None if all of them are the middle of the codes."""
    stored, middle = unpacked(packed, bits)[:, :n], 1 << (bits - 1)
    first = int(stored[0, 0])
    if layout.symmetric and first in (middle - 1, middle) and bool((stored == first).all()):
        return None
    if not layout.stored_less:
        return stored
    # Whole words at once, as writers subtract: a zero of 0 borrows from the next one in its word.
    ones = sum(1 << place for place in range(0, 32, bits))
    more = (packed.to(torch.int64) + layout.stored_less * ones) & 0xFFFFFFFF
    words = torch.where(more >= 1 << 31, more - (1 << 32), more).to(torch.int32)
    return unpacked(words, bits)[:, :n]
