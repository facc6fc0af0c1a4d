"""Tensor maps, with which Hopper's TMA copies boxes of a matrix to shared memory."""

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
_L2Promotion = type(TensorMapDescriptorOptions.l2_promotion)
L2_PROMOTIONS: dict[L2Sector, Any] = {128: _L2Promotion.L2_128B, 256: _L2Promotion.L2_256B}


def matrix_map(matrix: Tensor, box: tuple[int, int], l2_sector: L2Sector) -> object:
    """A tensor map of a matrix, to be passed to a kernel by value.

    Args:
        matrix: [rows, columns] of 8- or 16-bit values on a GPU; each row contiguous, rows may be
            strided.
        box: rows and columns per copy. 128 bytes of columns are swizzled in chunks of 16.
        l2_sector: bytes that a read promotes to the L2 cache.
    """
    rows, columns = matrix.shape
    itemsize = matrix.itemsize
    address, stride = matrix.data_ptr(), matrix.stride(0)
    return _encode(address, rows, columns, stride, box, l2_sector, itemsize)


@cleared_by_recordings
@functools.lru_cache(maxsize=4096)
def _encode(
    address: int,
    rows: int,
    columns: int,
    row_stride: int,
    box: tuple[int, int],
    l2_sector: L2Sector,
    itemsize: int,
) -> object:
    if launched() is not None:
        return None
    matrix = _Matrix(address, (rows, columns), row_stride, itemsize)
    return StridedMemoryView.from_any_interface(matrix, stream_ptr=-1).as_tensor_map(
        box,
        data_type=np.dtype(f"u{itemsize}"),
        swizzle=SWIZZLE_128B,
        l2_promotion=L2_PROMOTIONS[l2_sector],
    )


class _Matrix:
    """Values in device memory, for the CUDA array interface.

    A tensor map created from a tensor would keep its memory alive in the cache of maps.
    """

    def __init__(
        self, address: int, shape: tuple[int, int], row_stride: int, itemsize: int
    ) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": shape,
            "strides": (itemsize * row_stride, itemsize),
            "typestr": f"<u{itemsize}",
            "data": (address, False),
        }
