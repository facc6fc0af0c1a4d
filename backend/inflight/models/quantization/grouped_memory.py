"""Memory of matrices of codes with scales of groups.

Importing this module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from inflight.models.quantization.recognition import StoredFormat

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KeptValues:
    """Weights in codes with scales of groups.

    Attributes:
        types: the names of their types; of a GGUF file that of most weights first.
        num_values: how many.
        num_bytes: that they take.
    """

    types: tuple[str, ...] = ()
    num_values: int = 0
    num_bytes: int = 0

    @property
    def bits(self) -> float:
        """Per weight, with its share of scales; 0 without any."""
        return 8 * self.num_bytes / self.num_values if self.num_values else 0.0


@dataclass(frozen=True, slots=True)
class Form:
    """Of a matrix of codes.

    Attributes:
        bits: of a code: 4, 5, 6 or 8.
        group: columns with a scale in common.
        has_minimums: whether a group has a minimum.
        width: columns of the matrix.
        is_symmetric: whether the code in the middle stands for 0; without minimums.
        has_units: whether scales are integers times a number of more columns.
    """

    bits: int
    group: int
    has_minimums: bool
    width: int
    is_symmetric: bool = True
    has_units: bool = False


BitsOf = Callable[[Form], float]
"""Bits per weight."""


def host_bits(form: Form) -> float:
    """Bits per weight in memory of a CPU.

    Kernels read codes of 4 bits packed, wider ones from a byte each. A scale has 16 bits, and so
    has a minimum.
    """
    num_factors = 1 + form.has_minimums
    return (4 if form.bits == 4 else 8) + 16 * num_factors / form.group


def record_bits(form: Form) -> float:
    """The same on a GPU, where codes of 5 bits have 6, another zero is a minimum, columns are
    padded and groups are those that kernels have: see `grouped_rows`."""
    columns, kept_bits = 128, next(kept for kept in (4, 6, 8) if form.bits <= kept)
    num_factors = 1 + (form.has_minimums or not form.is_symmetric)
    if form.has_units:
        of_scales = num_factors * (8 / form.group + 16 / columns)
    else:
        groups = (32, 16) if kept_bits == 6 else (128, 32, 16)
        kept = next((one for one in groups if form.group % one == 0), groups[0])
        of_scales = num_factors * 16 / kept
    padded = -(-form.width // columns) * columns
    return (kept_bits + of_scales) * padded / form.width


def rounded_bits(width: int, bits_of: BitsOf = host_bits) -> float | None:
    """Bits per weight that is rounded to 4 bits when it is loaded; None if it is not rounded.

    Args:
        width: columns of its matrix.
        bits_of: those of other matrices.
    """
    from inflight.models.quantization.rounding import group_of

    group = group_of(width)
    return None if group is None else bits_of(Form(4, group, True, width))


def kept_sum(types: Iterable[str], sizes: Iterable[tuple[int, float | None]]) -> KeptValues:
    """Of matrices in codes.

    Args:
        types: see `KeptValues`.
        sizes: of each matrix how many values it has, and bits of one of them; None if it is not in
            codes, and does not count.
    """
    found = [(count, bits) for count, bits in sizes if bits is not None]
    if not found:
        return KeptValues()
    num_bits = sum(count * bits for count, bits in found)
    return KeptValues(tuple(types), sum(count for count, _ in found), math.ceil(num_bits / 8))


def kept_in_folder(
    path: Path, stored: StoredFormat, shapes: Mapping[str, Shape], bits_of: BitsOf = host_bits
) -> KeptValues:
    """What linear layers of a folder with codes have in them.

    Parts of fused layers that differ in format are counted although they are dequantised.

    Args:
        path: of the folder.
        stored: its format.
        shapes: of the linear layers' weights, by name.
        bits_of: bits per weight.

    Raises:
        ConfigError: the files are corrupt.
    """
    from inflight.checkpoint import safetensors
    from inflight.models.quantization.layouts.folder import find_matrices
    from inflight_kernels.cpu_ops.grouped_linear import can_pack

    tensors = safetensors.read_folder(path, safetensors.WEIGHTS + safetensors.QUANTIZED)
    matrices, _ = find_matrices(tensors, stored.layouts, stored.dtypes, path)
    return kept_sum(
        stored.labels,
        (
            (
                math.prod(one.shape),
                bits_of(Form(one.bits, one.group, one.has_minimums, one.shape[1])),
            )
            for name, one in matrices.items()
            if name in shapes and one.is_grouped and can_pack(one.shape[1], one.group)
        ),
    )


def rounded_layers(shapes: Iterable[Shape], bits_of: BitsOf = host_bits) -> KeptValues:
    """Linear layers of these shapes that are rounded to 4 bits when they are loaded."""
    sizes = ((math.prod(shape), rounded_bits(shape[1], bits_of)) for shape in shapes)
    return kept_sum(("int4",), sizes)


def drawn_experts(
    stored: StoredFormat, shapes: Mapping[str, Shape], bits_of: BitsOf = host_bits
) -> KeptValues:
    """Experts that are drawn in MXFP4."""
    experts = [shape for name, shape in shapes.items() if ".experts." in name]
    sizes = ((math.prod(shape), bits_of(Form(4, 32, False, shape[1]))) for shape in experts)
    return kept_sum(stored.labels, sizes)
