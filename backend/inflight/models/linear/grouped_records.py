"""Matrices of codes with scales of groups in records, as GPU kernels read them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inflight.models.quantization.grouped import GroupedMatrix, in_one_kind
from inflight.models.quantization.matrix import Matrix
from inflight_kernels.ops.linear.grouped_rows import GroupedRows, can_pack, pack


def joined_records(
    weights: Sequence[Matrix], device: torch.device, order: Tensor | None = None
) -> GroupedRows | None:
    """Matrices in groups, one below the other, with the same values.

    Args:
        weights: one or more, of the same width.
        device: where they are packed.
        order: of all rows [n]; None for that of the matrices.

    Returns:
        None if one of them is not in groups, or if kernels do not take them as they are.
    """
    parts = [part for part in weights if isinstance(part, GroupedMatrix)]
    if len(parts) < len(weights):
        return None
    # Levels of a matrix that is on the meta device are not.
    whole = in_one_kind(
        [part if part.codes.device == device else part.to(device) for part in parts]
    )
    if whole is None or not _is_supported(whole):
        return None
    if order is not None and not whole.codes.is_meta:  # see `matrix.quantize`
        whole = whole.rows(order.to(device))
    return pack(
        whole.codes,
        whole.bits,
        whole.scales,
        whole.minimums,
        whole.zero,
        whole.levels,
        whole.units,
    )


def _is_supported(matrix: GroupedMatrix) -> bool:
    has_form = matrix.levels is None or (matrix.bits == 4 and matrix.minimums is None)
    return matrix.columns is None and has_form and can_pack(matrix.shape[1], matrix.group)
