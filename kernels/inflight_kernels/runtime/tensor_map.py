"""Tensor maps, with which Hopper's TMA copies boxes of values to shared memory."""

from __future__ import annotations

import functools
from typing import Any, Literal

import numpy as np
from cuda.core import TensorMapDescriptorOptions
from cuda.core.utils import StridedMemoryView
from torch import Tensor

from inflight_kernels.runtime.recording import cleared_by_recordings, launched

L2Sector = Literal[128, 256]

# cuda.core exports the options of a tensor map but not their enumerations, which are taken from the
# defaults.
SWIZZLE_128B = type(TensorMapDescriptorOptions.swizzle).SWIZZLE_128B
_SWIZZLES = {
    32: type(TensorMapDescriptorOptions.swizzle).SWIZZLE_32B,
    64: type(TensorMapDescriptorOptions.swizzle).SWIZZLE_64B,
    128: SWIZZLE_128B,
}
_NO_SWIZZLE = type(TensorMapDescriptorOptions.swizzle).NONE
_L2Promotion = type(TensorMapDescriptorOptions.l2_promotion)
L2_PROMOTIONS: dict[L2Sector, Any] = {128: _L2Promotion.L2_128B, 256: _L2Promotion.L2_256B}


def matrix_map(
    matrix: Tensor, box: tuple[int, int], l2_sector: L2Sector, *, swizzles: bool = True
) -> object:
    """A tensor map of a matrix, to be passed to a kernel by value.

    Args:
        matrix: [rows, columns] of 8- or 16-bit values on a GPU; each row contiguous, rows may be
            strided.
        box: rows and columns per copy. The columns, of 32, 64 or 128 bytes, are swizzled in chunks
            of 16 bytes; if they are not, they have up to 256 bytes.
        l2_sector: bytes that a read promotes to the L2 cache.
        swizzles: whether they are.
    """
    rows, columns = matrix.shape
    size = matrix.itemsize
    strides = size * matrix.stride(0), size
    swizzle = _SWIZZLES[size * box[1]] if swizzles else _NO_SWIZZLE
    return strided_map(matrix.data_ptr(), (rows, columns), strides, box, l2_sector, swizzle)


def box_map(matrix: Tensor, box: tuple[int, int], l2_sector: L2Sector) -> object:
    """As `matrix_map`, of copies with more than 128 bytes of each row.

    Args:
        matrix: [rows, columns] contiguous, of whole boxes of 128 bytes.
        box: boxes and rows per copy, a box with 128 bytes of each row behind the other.
        l2_sector: see there.
    """
    rows, columns = matrix.shape
    row_bytes = columns * matrix.itemsize
    shape = row_bytes // _BOX_BYTES, rows, _BOX_BYTES // matrix.itemsize
    strides = _BOX_BYTES, row_bytes, matrix.itemsize
    sizes = *box, shape[2]
    return strided_map(matrix.data_ptr(), shape, strides, sizes, l2_sector, SWIZZLE_128B)


_BOX_BYTES = 128

_RECORD_PARTS, _RECORD_SIZE = 2, 8


def record_map(records: Tensor, num_tiles: int) -> object:
    """A tensor map of the records of a weight, to be passed to a kernel by value.

    A box has up to 256 values in a dimension. So a record is two rows of values of 8 bytes, and a
    copy begins at column 0 of row 2 * chunk of a tile.

    Args:
        records: [tiles, chunks, bytes] uint8 on a GPU, of up to 4096 bytes.
        num_tiles: whose records of the same chunk are copied at once, one behind the other.
    """
    tiles, chunks, size = records.shape
    part = size // _RECORD_PARTS
    shape = tiles, _RECORD_PARTS * chunks, part // _RECORD_SIZE
    strides = chunks * size, part, _RECORD_SIZE
    box = num_tiles, _RECORD_PARTS, part // _RECORD_SIZE
    return strided_map(records.data_ptr(), shape, strides, box, 256, _NO_SWIZZLE)


@cleared_by_recordings
@functools.lru_cache(maxsize=4096)
def strided_map(
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    l2_sector: L2Sector,
    swizzle: Any,
) -> object:
    """A tensor map of values in device memory, to be passed to a kernel by value.

    Args:
        address: of the first value.
        shape, box: of all values, and of those of a copy.
        strides: in bytes; the last one is the size of a value.
        l2_sector: see `matrix_map`.
        swizzle: of chunks of 16 bytes in shared memory, as SWIZZLE_128B.
    """
    if launched() is not None:
        return None
    values = _Values(address, shape, strides)
    return StridedMemoryView.from_any_interface(values, stream_ptr=-1).as_tensor_map(
        box,
        data_type=np.dtype(f"u{strides[-1]}"),
        swizzle=swizzle,
        l2_promotion=L2_PROMOTIONS[l2_sector],
    )


class _Values:
    """Values in device memory, for the CUDA array interface.

    A tensor map created from a tensor would keep its memory alive in the cache of maps.
    """

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": shape,
            "strides": strides,
            "typestr": f"<u{strides[-1]}",
            "data": (address, False),
        }
