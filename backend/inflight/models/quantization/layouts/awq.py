"""AWQ, version gemm: 4 bits with a zero for each group.

A weight [n, k] is qweight [k, n / 8] int32, packed along n; qzeros [k / group, n / 8] int32, packed
likewise; scales [k / group, n]. Place j of a word, from its lowest bits, has column
[0, 2, 4, 6, 1, 3, 5, 7][j] of eight: an order that suits AutoAWQ's kernel.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from inflight.checkpoint.safetensors import WEIGHTS, StoredTensor
from inflight.models.quantization.grouped import GroupedMatrix
from inflight.models.quantization.layouts.codes import unpacked, with_zeros
from inflight.models.quantization.layouts.layout import Layout
from inflight.models.quantization.layouts.parts import Parts, StoredMatrix

_BITS, _PER_WORD = 4, 8
_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""Of columns, in words."""


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
        _columns(packed.read()).T.contiguous(),
        _BITS,
        parts.finite(scales.read(), f"{module}scales").T.contiguous(),
        _columns(zeros.read()).T,
    )


def _columns(packed: Tensor) -> Tensor:
    """[m, n / 8] int32 as [m, n] codes, in order."""
    return unpacked(packed, _BITS).view(len(packed), -1, _PER_WORD)[:, :, _PLACES].flatten(1)
