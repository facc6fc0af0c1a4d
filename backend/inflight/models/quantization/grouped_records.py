"""Matrices of codes with scales of groups in records, as GPU kernels read them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inflight.models.quantization.grouped import GroupedMatrix, concatenated
from inflight.models.quantization.matrix import Matrix
from inflight_kernels.ops.linear.grouped_rows import RECORD_ROWS, GroupedRows, can_pack, pack


def joined_records(
    weights: Sequence[Matrix], device: torch.device, order: Tensor | None = None
) -> GroupedRows | None:
    """Matrices of one kind, one below the other.

    Args:
        weights: one or more, of the same width.
        device: where they are packed.
        order: of all rows [n]; None for that of the matrices.

    Returns:
        None if they are not in groups of one kind, or if kernels do not take them as they are.
    """
    parts = [part for part in weights if isinstance(part, GroupedMatrix) and _is_supported(part)]
    num_rows = sum(part.shape[0] for part in parts)
    if len(parts) < len(weights) or len({part.kind for part in parts}) > 1:
        return None
    if num_rows % RECORD_ROWS:
        return None
    # Levels of a matrix that is on the meta device are not.
    whole = concatenated(
        [part if part.codes.device == device else part.to(device) for part in parts]
    )
    if order is not None and not whole.codes.is_meta:  # see `matrix.quantize`
        whole = whole.rows(order.to(device))
    return pack(whole.codes, whole.bits, whole.scales, whole.minimums, whole.zero, whole.levels)


def _is_supported(matrix: GroupedMatrix) -> bool:
    has_levels = matrix.levels is None or matrix.bits == 4
    return matrix.columns is None and has_levels and can_pack(matrix.shape[1], matrix.group)
