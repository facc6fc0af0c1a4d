"""Codes of matrices as files pack them.

Words are little-endian, as safetensors files have them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.models.quantization.grouped import GroupedMatrix
from inflight.models.quantization.layouts.parts import Parts
from inflight.models.quantization.matrix import Matrix


def unpacked(packed: Tensor, bits: int) -> Tensor:
    """Codes [rows, columns] uint8, the lowest bits of each byte or word first.

    Args:
        packed: [rows, n] uint8 or int32.
        bits: of a code: 4 or 8.
    """
    octets = octets_of(packed)
    if bits == 8:
        return octets
    return torch.stack([octets & 15, octets >> 4], -1).flatten(1)


def octets_of(packed: Tensor) -> Tensor:
    """The bytes [rows, columns] uint8 of a matrix [rows, n], the lowest of each word first."""
    # Flat first: a matrix of one column may be contiguous whatever its strides.
    return packed.contiguous().view(-1).view(torch.uint8).view(len(packed), -1)


def with_zeros(codes: Tensor, bits: int, scales: Tensor, zeros: Tensor) -> GroupedMatrix:
    """The matrix of values (code - zero) * scale.

    A float32 holds zero * scale if the scale has 16 bits, so that nothing is rounded.

    Args:
        codes: [n, k] uint8.
        bits: of a code.
        scales: [n, k / group] float32.
        zeros: as scales, any type.
    """
    return GroupedMatrix(codes, bits, scales, minimums=-(zeros.to(torch.float32) * scales))


def checked_groups(parts: Parts, name: str, groups: Tensor, num_groups: int) -> Tensor:
    """The group of each column.

    Raises:
        ConfigError: there is no such group.
    """
    if bool(((groups < 0) | (groups >= num_groups)).any()):
        found = f"names groups from {int(groups.min())} to {int(groups.max())}"
        raise parts.error(name, found, f"0 to {num_groups - 1}")
    return groups


def in_order(matrix: GroupedMatrix, groups: Tensor) -> Matrix:
    """A matrix whose columns of a group need not be neighbours.

    Args:
        matrix: with columns as they are stored; its scales are those of the groups.
        groups: [k] int64, the group of each column, each within bounds.

    Returns:
        The matrix, its columns sorted by groups; dequantised if groups are not equally large.
    """
    k, num_groups = matrix.shape[1], matrix.scales.shape[1]
    if not num_groups or not torch.equal(
        torch.bincount(groups, minlength=num_groups),
        torch.full((num_groups,), k // num_groups),
    ):
        scales = matrix.scales[:, groups]
        values = (matrix.codes.to(torch.float32) - matrix.zero) * scales
        return values if matrix.minimums is None else values + matrix.minimums[:, groups]
    columns = groups.argsort(stable=True)
    if torch.equal(columns, torch.arange(k)):
        return matrix
    return GroupedMatrix(
        matrix.codes[:, columns],
        matrix.bits,
        matrix.scales,
        matrix.minimums,
        matrix.zero,
        matrix.levels,
        columns,
    )
