"""Page-locked host memory, and copies of rows between it and a device by the copy engines."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from cuda.bindings import driver
from torch import Tensor


class HostMemoryError(Exception):
    """The driver refused to lock memory, or to copy."""


class Rows(NamedTuple):
    """Rows of equal length at equal distances.

    Attributes:
        address: of the first row.
        pitch: bytes from one row to the next.
    """

    address: int
    pitch: int


def lock_pages(memory: Tensor) -> None:
    """Page-lock the memory of a CPU tensor, until `unlock_pages`, which must precede its end.

    Raises:
        HostMemoryError: the system does not allow that much.
    """
    torch.cuda.current_stream()  # creates the context
    num_bytes = memory.numel() * memory.element_size()
    _check("cuMemHostRegister", driver.cuMemHostRegister(memory.data_ptr(), num_bytes, 0))


def unlock_pages(memory: Tensor) -> None:
    """End `lock_pages`, once all copies have ended; does nothing if the driver refuses."""
    torch.cuda.synchronize()
    driver.cuMemHostUnregister(memory.data_ptr())


def to_device(host: Rows, device: Rows, row_bytes: int, num_rows: int) -> None:
    """Copy rows from page-locked memory, asynchronously on torch's current stream.

    Raises:
        HostMemoryError: the driver refused.
    """
    copy = _to_device()
    copy.srcHost, copy.srcPitch = host
    copy.dstDevice, copy.dstPitch = device
    _launch(copy, row_bytes, num_rows)


def to_host(device: Rows, host: Rows, row_bytes: int, num_rows: int) -> None:
    """Copy rows to page-locked memory, asynchronously on torch's current stream.

    Raises:
        HostMemoryError: the driver refused.
    """
    copy = _to_host()
    copy.srcDevice, copy.srcPitch = device
    copy.dstHost, copy.dstPitch = host
    _launch(copy, row_bytes, num_rows)


def _launch(copy: Any, row_bytes: int, num_rows: int) -> None:
    copy.WidthInBytes, copy.Height = row_bytes, num_rows
    stream = torch.cuda.current_stream().cuda_stream
    _check("cuMemcpy2DAsync", driver.cuMemcpy2DAsync(copy, stream))


@functools.cache
def _to_device() -> Any:
    copy = driver.CUDA_MEMCPY2D()
    copy.srcMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_HOST
    copy.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    return copy


@functools.cache
def _to_host() -> Any:
    copy = driver.CUDA_MEMCPY2D()
    copy.srcMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_HOST
    return copy


def _check(name: str, result: tuple[Any, ...]) -> None:
    if result[0] != driver.CUresult.CUDA_SUCCESS:
        raise HostMemoryError(f"{name}: {result[0].name}")
