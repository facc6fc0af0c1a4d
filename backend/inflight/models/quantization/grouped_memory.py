"""Memory of matrices of codes with scales of groups.

Importing this module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from inflight.checkpoint.locate import Checkpoint
from inflight.config import Quantization
from inflight.models.quantization.recognition import StoredFormat, format_of

_SCALE_BITS = 16


def grouped_bits(bits: int, group: int, has_minimums: bool) -> float:
    """Bits of a weight in memory, with its part of the scale of its group.

    Args:
        bits: that a code takes.
        group: columns with a scale in common.
        has_minimums: whether groups have a minimum as well.
    """
    return bits + _SCALE_BITS / group * (2 if has_minimums else 1)


def code_bits(bits: int) -> int:
    """Bits that a code of so many takes in memory."""
    return 4 if bits == 4 else 8


@dataclass(frozen=True, slots=True)
class GroupedSize:
    """Of all matrices in groups that a model's linear layers have.

    Attributes:
        num_values: of them.
        num_bits: of them in memory, scales and minimums included.
    """

    num_values: int = 0
    num_bits: float = 0.0

    @property
    def num_bytes(self) -> int:
        return math.ceil(self.num_bits / 8)

    @property
    def bits_per_value(self) -> float:
        """Of one value on average; 0 without any."""
        return self.num_bits / self.num_values if self.num_values else 0.0


def grouped_size(
    checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]], quantization: Quantization
) -> GroupedSize:
    """What linear layers have in groups on a CPU.

    Args:
        checkpoint: the model's files.
        shapes: of the linear layers' weights, by name.
        quantization: the setting.

    Raises:
        ConfigError: the files are corrupt.
    """
    is_folder = checkpoint.format == "huggingface" and not checkpoint.random_weights
    found = format_of(checkpoint.path) if is_folder and quantization != "none" else None
    if found is not None and found.layouts:
        return _size_of(_stored_bits(checkpoint, found).items(), shapes)
    if quantization != "int4" or found is not None:
        return GroupedSize()
    return _size_of(((name, _rounded(shape[1])) for name, shape in shapes.items()), shapes)


def _size_of(
    bits_of: Iterable[tuple[str, float | None]], shapes: Mapping[str, tuple[int, ...]]
) -> GroupedSize:
    """Of the weights with these bits for each value; None for those that are not in groups."""
    found = [
        (math.prod(shapes[name]), bits)
        for name, bits in bits_of
        if bits is not None and name in shapes
    ]
    return GroupedSize(sum(count for count, _ in found), sum(count * bits for count, bits in found))


def _stored_bits(checkpoint: Checkpoint, found: StoredFormat) -> dict[str, float | None]:
    """Bits of a value by the names of weights in groups."""
    from inflight.checkpoint import safetensors
    from inflight.models.quantization.layouts.folder import find_matrices

    path = checkpoint.path
    stored = safetensors.read_folder(path, safetensors.WEIGHTS + safetensors.QUANTIZED)
    matrices, _ = find_matrices(stored, found.layouts, found.dtypes, path)
    return {
        name: grouped_bits(code_bits(one.bits), one.group, one.has_minimums)
        if one.is_grouped
        else None
        for name, one in matrices.items()
    }


def _rounded(width: int) -> float | None:
    """Bits of a value that is rounded when it is loaded."""
    from inflight.models.quantization.rounding import group_of

    group = group_of(width)
    return None if group is None else grouped_bits(4, group, has_minimums=True)
