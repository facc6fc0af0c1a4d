"""Kernels as callables: `kernel(stem, name)(grid, block, *args)` on torch's current stream.

A launch allocates nothing and waits for nothing, so it may be captured in a CUDA graph.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from ctypes import c_float
from typing import Any

import torch
from cuda.bindings import driver
from cuda.core import LEGACY_DEFAULT_STREAM, Device, LaunchConfig, ObjectCode, Stream, launch
from torch import Tensor

from inflight_kernels.runtime.compile import cubin, precompile
from inflight_kernels.runtime.recording import cleared_by_recordings, launched

Extent = int | tuple[int, ...]
"""Size of a grid or of a block: (x, y, z) or fewer."""

# More dynamic shared memory than this is given only to a kernel that asks for it.
_SHARED_BY_DEFAULT = 48 * 1024

_INT32_MIN, _INT32_MAX = -(2**31), 2**31 - 1


class Int64:
    """An argument of a kernel's `long long` or `size_t` parameter; a bare int is a 32-bit one."""

    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.value = value


class Kernel:
    """A kernel of a loaded cubin.

    Call it with a grid (in blocks), a block (in threads) and the arguments: torch tensors for
    pointers, int for `int`, Int64 for `long long`, float for `float`, bool for `bool`. What
    cuda.core takes itself, such as a tensor map, goes through.
    """

    def __init__(self, name: str, handle: Any) -> None:
        self.name = name
        self._handle = handle
        self._shared: dict[int, int] = {}  # by device: dynamic shared memory asked for, in bytes

    def __call__(
        self, grid: Extent, block: Extent, *args: object, shared: int = 0, pdl: bool = False
    ) -> None:
        """Launch on torch's current stream and device.

        Args:
            grid: blocks; an empty grid is an error of the driver, so callers return before.
            block: threads per block.
            args: see the class.
            shared: dynamic shared memory per block, in bytes.
            pdl: start while the kernel before still runs (programmatic dependent launch), where
                the device can. The kernel must call `pdl_wait()` of common.cuh before it
                touches memory that an earlier kernel writes, or writes what one reads.

        Raises:
            TypeError: for an argument of another type.
            OverflowError: for an int beyond 32 bits.
        """
        packed = [_PACK.get(type(arg), _pack_other)(arg) for arg in args]
        # Private, since this is the hot path: torch.cuda.current_device() and current_stream() also
        # check at each call that CUDA is initialised, and make a Stream object.
        device = torch._C._cuda_getDevice()
        stream = _stream(device, torch._C._cuda_getCurrentRawStream(device))
        if shared > _SHARED_BY_DEFAULT and shared > self._shared.get(device, 0):
            self._allow_shared(device, shared)
        config = _config(grid, block, shared, pdl and supports_pdl())
        launch(stream, config, self._handle, *packed)

    def _allow_shared(self, device: int, shared: int) -> None:
        (error,) = driver.cuKernelSetAttribute(
            driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
            shared,
            self._handle.handle,
            driver.CUdevice(device),
        )
        if error != driver.CUresult.CUDA_SUCCESS:
            raise ValueError(
                f"{self.name}: {shared} bytes of dynamic shared memory per block are more than "
                f"device {device} gives ({error.name})"
            )
        self._shared[device] = shared


@cleared_by_recordings
@functools.cache
def kernel(stem: str, name: str, defines: tuple[tuple[str, str], ...] = ()) -> Kernel:
    """Kernel `name`, a name expression, of <stem>.cu, for the current device.

    All devices of a process are taken to be of one architecture. While launches are recorded
    (see `record_launches`), it is one that launches nothing.

    Raises:
        CompileError: see `inflight_kernels.runtime.compile.cubin`.
    """
    recorded = launched()
    if recorded is not None:
        recorded[stem, name] = None
        return _LaunchesNothing(name, None)
    compiled = cubin(stem, (name,), defines, arch=_architecture())
    _enter(torch.cuda.current_device())
    code = ObjectCode.from_cubin(compiled.code, name=stem)
    return Kernel(name, code.get_kernel(compiled.symbols[name]))


class _LaunchesNothing(Kernel):
    def __call__(
        self, grid: Extent, block: Extent, *args: object, shared: int = 0, pdl: bool = False
    ) -> None:
        pass


def precompile_kernels(kernels: Iterable[tuple[str, str]]) -> None:
    """Begin to compile kernels, (stem, name) each, for the current device: see `precompile`."""
    precompile(kernels, arch=_architecture())


def supports_pdl() -> bool:
    """Whether the current device knows programmatic dependent launch (Hopper and later)."""
    return _architecture() != "sm_80"


@functools.cache
def is_hopper() -> bool:
    """Whether there is a current device, and it runs code for sm_90a."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@functools.cache
def num_multiprocessors() -> int:
    """Of the current device."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


@functools.cache
def _architecture() -> str:
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        raise RuntimeError(
            f"compute capability {major}.{minor} is too old for these kernels; they need 8.0 "
            "(Ampere) or later"
        )
    # Code for 8.0 runs on all of 8.x, and code for 9.0a on 9.0 alone.
    return {8: "sm_80", 9: "sm_90a"}.get(major, f"sm_{major}{minor}")


# ---------------------------------------------------------------- operands

STORAGE_TYPES = {
    torch.bfloat16: "__nv_bfloat16",
    torch.float16: "__half",
    torch.float32: "float",
}
"""Types of values in memory, as torch and as C++ name them. Kernels compute in float32."""

ID_TYPES = {torch.int32: "int", torch.int64: "long long"}
"""Types of token ids, blocks and slots."""

VECTOR_BYTES = 16
"""What a thread moves at once; rows and addresses are multiples of it."""


def check(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, vectors: bool = True
) -> None:
    """Refuse an operand that a kernel cannot take: another shape, type, layout or device.

    Args:
        name: of the operand, for the error.
        tensor: the operand.
        shape, dtype: what it should have.
        vectors: whether the kernel reads it in vectors of 16 bytes.

    Raises:
        ValueError: with the name of the operand, what it is and what it should be.
    """
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        layout = "" if tensor.is_contiguous() else ", not contiguous"
        raise ValueError(
            f"{name} is {tensor.dtype} {list(tensor.shape)}{layout}; "
            f"it should be {dtype} {list(shape)}, contiguous"
        )
    check_memory(name, tensor, vectors)


def check_memory(name: str, tensor: Tensor, vectors: bool = True) -> None:
    """Refuse an operand that is not on a CUDA device, or not at a multiple of 16 bytes.

    While launches are recorded, the meta device is one as well.

    Raises:
        ValueError: with the name of the operand.
    """
    if not tensor.is_cuda:
        if tensor.is_meta and launched() is not None:
            return
        raise ValueError(f"{name} is on {tensor.device}; kernels need it on a CUDA device")
    if vectors and tensor.data_ptr() % VECTOR_BYTES:
        raise ValueError(
            f"{name} starts {tensor.data_ptr() % VECTOR_BYTES} bytes past a multiple of "
            f"{VECTOR_BYTES}; kernels read whole vectors of that size"
        )


def vectors_in(name: str, num_values: int, dtype: torch.dtype) -> int:
    """Vectors of 16 bytes that a row of num_values takes.

    Raises:
        ValueError: if the row is not whole vectors.
    """
    num_bytes = num_values * dtype.itemsize
    if num_bytes % VECTOR_BYTES:
        raise ValueError(
            f"{name}: {num_values} values of {dtype} are not whole vectors of {VECTOR_BYTES} "
            f"bytes; a multiple of {VECTOR_BYTES // dtype.itemsize} is"
        )
    return num_bytes // VECTOR_BYTES


def name_of(table: dict[torch.dtype, str], name: str, tensor: Tensor) -> str:
    """The C++ name of a tensor's type, if it is in the table.

    Raises:
        ValueError: with the name of the operand and the types that are allowed.
    """
    try:
        return table[tensor.dtype]
    except KeyError:
        allowed = ", ".join(str(dtype) for dtype in table)
        raise ValueError(f"{name} is {tensor.dtype}; it may be {allowed}") from None


# ---------------------------------------------------------------- arguments


def _pack_int(arg: int) -> int:
    # cuda.core passes 8 bytes, of which the driver takes the lower 4: a larger value would be cut.
    if not _INT32_MIN <= arg <= _INT32_MAX:
        raise OverflowError(f"{arg} does not fit a kernel's 32-bit int; pass Int64({arg})")
    return arg


def _pack_other(arg: Any) -> Any:
    if isinstance(arg, Tensor):  # a subclass, such as a Parameter
        return arg.data_ptr()
    if type(arg).__module__.startswith("cuda.core"):
        return arg
    raise TypeError(f"a kernel takes tensors, int, Int64, float and bool, not {type(arg).__name__}")


_PACK: dict[type, Callable[[Any], Any]] = {
    Tensor: Tensor.data_ptr,
    int: _pack_int,
    Int64: lambda arg: arg.value,
    float: c_float,
    bool: bool,
}


# ---------------------------------------------------------------- where and how


@functools.lru_cache(maxsize=4096)
def _config(grid: Extent, block: Extent, shared: int, pdl: bool) -> LaunchConfig:
    return LaunchConfig(
        grid=grid, block=block, shmem_size=shared, programmatic_stream_serialization=pdl
    )


_here = threading.local()


def _stream(device: int, handle: int) -> Stream:
    """cuda.core's view of a torch stream; the first time in a thread, also its CUDA context."""
    try:
        streams = _here.streams
    except AttributeError:
        streams = _here.streams = {}
    found = streams.get((device, handle))
    if found is None:
        _enter(device)
        found = Stream.from_handle(handle) if handle else LEGACY_DEFAULT_STREAM
        streams[device, handle] = found
    return found


def _enter(device: int) -> None:
    """Make torch's context the calling thread's.

    torch does so only when it calls the runtime, which a thread that uses cached memory may never
    have done.
    """
    Device(device).set_current()
