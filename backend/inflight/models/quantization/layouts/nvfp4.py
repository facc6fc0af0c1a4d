"""NVFP4: FP4 with an FP8 scale for each 16 columns, and one for the matrix.

A weight [n, k] has two codes in a byte, the column before in the lower bits, and a scale for each
group, e4m3 [n, k / 16]. compressed-tensors has them as weight_packed and weight_scale, and divides
by weight_global_scale; ModelOpt has weight and weight_scale, and multiplies by weight_scale_2.
Activations keep 16 bits, though the format is meant for those of 4 as well, so their scales are not
needed.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from inflight.checkpoint.safetensors import StoredTensor
from inflight.models.quantization.grouped import GroupedMatrix
from inflight.models.quantization.layouts.codes import unpacked
from inflight.models.quantization.layouts.floats import E2M1
from inflight.models.quantization.layouts.layout import Layout
from inflight.models.quantization.layouts.parts import Parts, StoredMatrix

_BITS, _GROUP = 4, 16
_SCALAR = [(), (1,)]


def matrices(parts: Parts, layouts: list[Layout]) -> dict[str, StoredMatrix]:
    """By the name of the weight.

    Args:
        parts: of the folder.
        layouts: one of this kind.

    Raises:
        ConfigError: tensors of a weight do not fit together.
    """
    found = {}
    for suffix, common in (("weight_packed", "weight_global_scale"), ("weight", "weight_scale_2")):
        for module in list(parts.modules(f".{suffix}", ("U8",))):
            names = (f"{module}.{suffix}", f"{module}.weight_scale", f"{module}.{common}")
            found[f"{module}.weight"] = _matrix(parts, names)
    return found


def _matrix(parts: Parts, names: tuple[str, str, str]) -> StoredMatrix:
    packed_name, scale_name, common_name = names
    packed = parts.take(packed_name, ("U8",))
    shape = packed.shape
    if len(shape) != 2 or 0 in shape or shape[1] * 2 % _GROUP:
        raise parts.error(packed_name, f"has the shape {list(shape)}", "[n, k / 2], k % 16 = 0")
    n, k = shape[0], 2 * shape[1]
    scales = parts.take(scale_name, ("F8_E4M3",), [(n, k // _GROUP)])
    common = parts.take(common_name, ("F32",), _SCALAR)
    read = partial(_read, parts, names, (packed, scales, common))
    return StoredMatrix((n, k), _BITS, _GROUP, has_minimums=False, read=read, levels=E2M1)


def _read(
    parts: Parts,
    names: tuple[str, str, str],
    tensors: tuple[StoredTensor, StoredTensor, StoredTensor],
) -> GroupedMatrix:
    packed, scales, common = tensors
    _, scale_name, common_name = names
    factor = parts.finite(common.read().view(()), common_name)
    stored = parts.finite(scales.read(), scale_name)
    divides = common_name.endswith("weight_global_scale")
    if divides and not factor:
        raise parts.error(common_name, "is 0", "a number to divide by")
    folded: Tensor = stored / factor if divides else stored * factor
    folded = parts.finite(folded, scale_name)
    return GroupedMatrix(unpacked(packed.read(), _BITS), _BITS, folded, levels=E2M1)
