"""What the lanes of a warp hold of matrices, in numpy: ldmatrix, movmatrix and mma.m16n8k16 of the
PTX manual."""

from __future__ import annotations

import itertools

import numpy as np

LANES = np.arange(32)


def banks(addresses, width):
    """Banks of 4 bytes that lanes touch, `width` bytes each."""
    return np.concatenate([(addresses + offset) // 4 % 32 for offset in range(0, width, 4)])


def ldmatrix(tile, rows, columns, transposed=False):
    """[32, 4, 2]: what each lane gets of four 8x8 matrices, whose rows start at (rows, columns)."""
    out = np.empty((32, 4, 2), tile.dtype)
    for matrix in range(4):
        source = slice(8 * matrix, 8 * matrix + 8)
        values = np.stack(
            [tile[r, c : c + 8] for r, c in zip(rows[source], columns[source], strict=True)]
        )
        if transposed:
            values = values.T
        for element in range(2):
            out[:, matrix, element] = values[LANES // 4, 2 * (LANES % 4) + element]
    return out


def left(fragment):
    """[16, 16] from the registers a0..a3 of all lanes, as mma.m16n8k16 reads them."""
    matrix = np.full((16, 16), np.nan)
    for register, element in itertools.product(range(4), range(2)):
        row = LANES // 4 + register % 2 * 8
        matrix[row, 2 * (LANES % 4) + element + register // 2 * 8] = fragment[:, register, element]
    return matrix


def right(fragment):
    """[16, 8] from b0, b1."""
    matrix = np.full((16, 8), np.nan)
    for register, element in itertools.product(range(2), range(2)):
        matrix[2 * (LANES % 4) + element + register * 8, LANES // 4] = fragment[
            :, register, element
        ]
    return matrix


def accumulators(matrix):
    """[32, 4] of a [16, 8] result."""
    element = np.arange(4)
    return matrix[(LANES // 4)[:, None] + element // 2 * 8, 2 * (LANES % 4)[:, None] + element % 2]


def transposed(word):
    """movmatrix: 8x8, two elements a lane, as ldmatrix lays them."""
    matrix = np.empty((8, 8), word.dtype)
    for element in range(2):
        matrix[LANES // 4, 2 * (LANES % 4) + element] = word[:, element]
    return matrix[2 * (LANES % 4)[:, None] + np.arange(2), (LANES // 4)[:, None]]
