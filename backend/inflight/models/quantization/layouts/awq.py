"""AWQ, version gemm: 4 bits with a zero for each group.

A weight [n, k] is qweight [k, n / 8] int32, packed along n; qzeros [k / group, n / 8] int32, packed
likewise; scales [k / group, n]. Place j of a word, from its lowest bits, has column
[0, 2, 4, 6, 1, 3, 5, 7][j] of eight: an order that suits AutoAWQ's kernel.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from inflight.checkpoint.safetensors import WEIGHTS, StoredTensor
from inflight.models.quantization.grouped import GroupedMatrix
from inflight.models.quantization.layouts.codes import octets_of, with_zeros
from inflight.models.quantization.layouts.layout import Layout
from inflight.models.quantization.layouts.parts import Parts, StoredMatrix

_BITS, _PER_WORD = 4, 8
_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Of the places of a word."""


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
    k, n = packed.shape[0], packed.shape[1] * _PER_WORD
    (group,) = layout.group_sizes(k)
    if k % group:
        raise parts.error(name, f"has {k} rows", f"a multiple of {group}, as in config.json")
    zeros = parts.take(f"{module}qzeros", ("I32",), [(k // group, n // _PER_WORD)])
    scales = parts.take(f"{module}scales", WEIGHTS, [(k // group, n)])
    read = partial(_read, parts, module, (packed, zeros, scales))
    return StoredMatrix((n, k), _BITS, group, has_minimums=True, read=read)


def _read(
    parts: Parts, module: str, tensors: tuple[StoredTensor, StoredTensor, StoredTensor]
) -> GroupedMatrix:
    packed, zeros, scales = tensors
    return with_zeros(
        _rows(packed.read()),
        _BITS,
        parts.finite(scales.read(), f"{module}scales").T.contiguous(),
        _rows(zeros.read()),
    )


def _rows(packed: Tensor) -> Tensor:
    """[m, n / 8] int32 as [n, m] codes, in order."""
    octets = octets_of(packed.T).view(packed.shape[1], len(packed), 4)
    codes = torch.empty(packed.shape[1], _PER_WORD, len(packed), dtype=torch.uint8)
    for at, octet in enumerate(octets.permute(2, 0, 1).contiguous()):
        low, high = _COLUMNS[2 * at : 2 * at + 2]
        torch.bitwise_and(octet, 15, out=codes[:, low])
        torch.bitwise_right_shift(octet, _BITS, out=codes[:, high])
    return codes.flatten(0, 1)
