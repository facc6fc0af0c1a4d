"""Kernels as callables: `kernel(stem, name)(grid, block, *args)` on torch's current stream.

A launch neither allocates nor synchronises, so it can be captured in a CUDA graph.
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

from inflight_kernels.runtime import architectures
from inflight_kernels.runtime.architectures import Capability
from inflight_kernels.runtime.compile import cubin, precompile
from inflight_kernels.runtime.recording import cleared_by_recordings, launched

Extent = int | tuple[int, ...]
"""Size of a grid or of a block: (x, y, z) or fewer."""

# More dynamic shared memory than this requires opting in per kernel.
_SHARED_BY_DEFAULT = 48 * 1024

_INT32_MIN, _INT32_MAX = -(2**31), 2**31 - 1


class Int64:
    """An argument for a `long long` or `size_t` parameter; a plain int is passed as 32 bits."""

    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.value = value


class Kernel:
    """A kernel of a loaded cubin.

    Call it with a grid (in blocks), a block (in threads) and the arguments: torch tensors for
    pointers, int for `int`, Int64 for `long long`, float for `float`, bool for `bool`. Objects of
    cuda.core, such as tensor maps, are passed through.
    """

    def __init__(self, name: str, handle: Any) -> None:
        self.name = name
        self._handle = handle
        self._shared: dict[int, int] = {}  # by device: maximum dynamic shared memory set, in bytes
        self._has_carveout: set[int] = set()  # devices

    def __call__(
        self,
        grid: Extent,
        block: Extent,
        *args: object,
        shared: int = 0,
        pdl: bool = False,
        max_carveout: bool = False,
    ) -> None:
        """Launch on torch's current stream and device.

        Args:
            grid: blocks; must not be empty (a driver error).
            block: threads per block.
            args: see the class.
            shared: dynamic shared memory per block, in bytes.
            pdl: programmatic dependent launch, if the device supports it: start while the preceding
                kernel still runs. The kernel must call `pdl_wait()` of common.cuh before it
                accesses memory that an earlier kernel writes, or writes memory that one reads.
            max_carveout: with `pdl`, have a multiprocessor's memory as shared memory rather than L1
                cache, also what this kernel does not need, so that blocks of the next one find room
                beside its own. A preference, which later launches of the kernel keep.

        Raises:
            TypeError: an argument has another type.
            OverflowError: an int exceeds 32 bits.
            ValueError: `shared` exceeds the device's limit.
            RuntimeError: the driver refuses the carveout.
        """
        packed = [_PACK.get(type(arg), _pack_other)(arg) for arg in args]
        # Private functions on this hot path: torch.cuda.current_device() and current_stream() also
        # check at each call that CUDA is initialised, and create a Stream object.
        device = torch._C._cuda_getDevice()
        stream = _stream(device, torch._C._cuda_getCurrentRawStream(device))
        if shared > _SHARED_BY_DEFAULT and shared > self._shared.get(device, 0):
            self._allow_shared(device, shared)
        overlaps = pdl and supports_pdl()
        if overlaps and max_carveout and device not in self._has_carveout:
            self._set_carveout(device)
        config = _config(grid, block, shared, overlaps)
        launch(stream, config, self._handle, *packed)

    def _allow_shared(self, device: int, shared: int) -> None:
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        error = self._set(attribute, shared, device)
        if error != driver.CUresult.CUDA_SUCCESS:
            raise ValueError(
                f"{self.name}: {shared} bytes of dynamic shared memory per block exceed the limit "
                f"of device {device} ({error.name})"
            )
        self._shared[device] = shared

    def _set_carveout(self, device: int) -> None:
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        error = self._set(attribute, 100, device)  # percent
        if error != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(
                f"{self.name}: device {device} refuses a shared memory carveout ({error.name})"
            )
        self._has_carveout.add(device)

    def _set(
        self, attribute: driver.CUfunction_attribute, value: int, device: int
    ) -> driver.CUresult:
        (error,) = driver.cuKernelSetAttribute(
            attribute, value, self._handle.handle, driver.CUdevice(device)
        )
        return error


@cleared_by_recordings
@functools.cache
def kernel(stem: str, name: str, defines: tuple[tuple[str, str], ...] = ()) -> Kernel:
    """Kernel `name`, a name expression, of <stem>.cu, for the current device.

    All devices of a process are assumed to be of one architecture. While launches are recorded
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
    def __call__(self, *args: object, **options: object) -> None:
        pass


def precompile_kernels(kernels: Iterable[tuple[str, str]]) -> None:
    """Start to compile kernels, (stem, name) each, for the current device; see `precompile`."""
    precompile(kernels, arch=_architecture())


def supports_pdl() -> bool:
    """Whether the current device supports programmatic dependent launch (Hopper and later)."""
    return architectures.launches_dependents(_capability())


@functools.cache
def is_hopper() -> bool:
    """Whether there is a current device that runs code for sm_90a."""
    return torch.cuda.is_available() and architectures.has_wgmma(_capability())


@functools.cache
def num_multiprocessors() -> int:
    """Number of multiprocessors of the current device."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


@functools.cache
def _architecture() -> str:
    major, minor = _capability()
    found = architectures.architecture((major, minor))
    if found is None:
        raise RuntimeError(
            f"the GPU has compute capability {major}.{minor}; the kernels support "
            f"{architectures.SUPPORTED}. Use another GPU, or the CPU"
        )
    return found


@functools.cache
def _capability() -> Capability:
    return torch.cuda.get_device_capability()


# ---------------------------------------------------------------- operands

STORAGE_TYPES = {
    torch.bfloat16: "__nv_bfloat16",
    torch.float16: "__half",
    torch.float32: "float",
}
"""Types of values in memory: torch dtype -> C++ type. Kernels compute in float32."""

BYTE_TYPES = {torch.float8_e4m3fn: "Fp8", torch.int8: "Int8"}
"""Types of 8 bits (kv_quantization.cuh): torch dtype -> C++ type."""

ID_TYPES = {torch.int32: "int", torch.int64: "long long"}
"""Types of token ids, blocks and slots."""

VECTOR_BYTES = 16
"""Width of a thread's memory access; rows and addresses are multiples of it."""


def check(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, vectors: bool = True
) -> None:
    """Check the shape, type, layout and device of a kernel's operand.

    Args:
        name: of the operand, for the error.
        tensor: the operand.
        shape, dtype: expected.
        vectors: whether the kernel reads it in vectors of 16 bytes.

    Raises:
        ValueError: with the name of the operand, what it is and what is expected.
    """
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        layout = "" if tensor.is_contiguous() else ", not contiguous"
        raise ValueError(
            f"{name} is {tensor.dtype} {list(tensor.shape)}{layout}; "
            f"expected {dtype} {list(shape)}, contiguous"
        )
    check_memory(name, tensor, vectors)


def check_memory(name: str, tensor: Tensor, vectors: bool = True) -> None:
    """Check that an operand is on a CUDA device and aligned to 16 bytes.

    While launches are recorded, the meta device is one as well.

    Raises:
        ValueError: with the name of the operand.
    """
    if not tensor.is_cuda:
        if tensor.is_meta and launched() is not None:
            return
        raise ValueError(f"{name} is on {tensor.device}; it must be on a CUDA device")
    if vectors and tensor.data_ptr() % VECTOR_BYTES:
        raise ValueError(
            f"{name} is misaligned by {tensor.data_ptr() % VECTOR_BYTES} bytes; it must be aligned "
            f"to {VECTOR_BYTES}"
        )


_MANY_ROWS = 1024


def fewest_vectors(num_rows: int) -> int:
    """Vectors of a thread, at least, if each block has a row and reads it once.

    Few rows wait for latencies, which as many threads as possible hide; many rows wait at barriers,
    which take less time in small blocks.
    """
    return 1 if num_rows < _MANY_ROWS else 2


def vectors_in(name: str, num_values: int, dtype: torch.dtype) -> int:
    """Number of 16-byte vectors in a row of num_values.

    Raises:
        ValueError: the row is not a multiple of a vector.
    """
    num_bytes = num_values * dtype.itemsize
    if num_bytes % VECTOR_BYTES:
        raise ValueError(
            f"{name}: {num_values} values of {dtype} are not a multiple of {VECTOR_BYTES} bytes; "
            f"allowed: multiples of {VECTOR_BYTES // dtype.itemsize}"
        )
    return num_bytes // VECTOR_BYTES


def name_of(table: dict[torch.dtype, str], name: str, tensor: Tensor) -> str:
    """The C++ name of a tensor's dtype.

    Raises:
        ValueError: with the name of the operand and the types that are allowed.
    """
    try:
        return table[tensor.dtype]
    except KeyError:
        allowed = ", ".join(str(dtype) for dtype in table)
        raise ValueError(f"{name} is {tensor.dtype}; allowed: {allowed}") from None


# ---------------------------------------------------------------- arguments


def _pack_int(arg: int) -> int:
    # cuda.core passes 8 bytes, of which the driver uses the lower 4: larger values would be cut.
    if not _INT32_MIN <= arg <= _INT32_MAX:
        raise OverflowError(f"{arg} does not fit in 32 bits; pass Int64({arg})")
    return arg


def _pack_other(arg: Any) -> Any:
    if isinstance(arg, Tensor):  # a subclass, such as a Parameter
        return arg.data_ptr()
    if type(arg).__module__.startswith("cuda.core"):
        return arg
    raise TypeError(
        f"{type(arg).__name__} is not a kernel argument; allowed: tensors, int, Int64, float, bool"
    )


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
    """cuda.core's view of a torch stream; on first use in a thread, sets its CUDA context."""
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
    """Make torch's CUDA context current in the calling thread.

    torch does so only when it calls the runtime, which may not have happened in a thread that uses
    cached memory.
    """
    Device(device).set_current()
