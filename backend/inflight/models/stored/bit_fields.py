"""Bit fields of bytes, each as a byte of its own.

Eight bytes are shifted and masked at a time, which numpy does eight times faster than byte by byte.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]

_EACH_BYTE = 0x0101010101010101


def fields(packed: Bytes, run: int, bits: int) -> Bytes:
    """Unpack runs of bytes: of each run all lowest fields, then all next ones, and so on.

    Args:
        packed: [B, m]; m is a multiple of `run`, and its rows are contiguous.
        run: bytes, a multiple of 8.
        bits: of a field: 1, 2 or 4.

    Returns:
        [B, m * 8 / bits].
    """
    num_blocks, width = packed.shape
    count = 8 // bits
    words = np.ascontiguousarray(packed).view(np.uint64)
    mask = np.uint64(((1 << bits) - 1) * _EACH_BYTE)
    out = np.empty((num_blocks, width * count), np.uint8)
    # Runs of 16 bytes are copied as one item, for loops over few items are slow.
    item = np.dtype(np.complex128) if run % 16 == 0 else np.dtype(np.uint64)
    length = run // item.itemsize
    targets = out.view(item).reshape(-1, count, length)
    for index in range(count):
        field = (words >> np.uint64(bits * index)) & mask
        sources = field.reshape(-1).view(item).reshape(-1, length)
        for at in range(length):
            targets[:, index, at] = sources[:, at]
    return out


def shifted(values: Bytes, bits: int) -> Bytes:
    """Contiguous bytes [B, m], m a multiple of 8, shifted left without loss."""
    return (values.view(np.uint64) << np.uint64(bits)).view(np.uint8)


def spread_table(bits: int) -> npt.NDArray[np.uint64]:
    """[256]: bit j of the index at place `bits` of byte j."""
    index = np.arange(256, dtype=np.uint8)[:, None]
    spread = ((index >> np.arange(8, dtype=np.uint8)) & 1) << np.uint8(bits)
    return np.ascontiguousarray(spread, np.uint8).view(np.uint64).reshape(-1)


def spread(packed: Bytes, table: npt.NDArray[np.uint64]) -> Bytes:
    """[B, 8 m] of bits [B, m], those of a byte from the lowest on, by a `spread_table`."""
    return table.take(packed).view(np.uint8)
