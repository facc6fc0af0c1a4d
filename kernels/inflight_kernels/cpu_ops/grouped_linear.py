"""Linear layers and embeddings with weight-only matrices of 4 or 8 bits, on a CPU.

A matrix [n, k] is (level(code) - zero) * scale + minimum, with a scale and a minimum for each group
of columns of a row. Products are those of float32 values; csrc/cpu/grouped_linear.c says how they
are computed and how the matrix lies in memory.
"""

from __future__ import annotations

import ctypes
import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight_kernels.runtime.host_compile import library

PANEL = 32
"""Rows that lie together; a matrix is padded to a multiple of them."""

# Exponent of the largest scale or minimum of a row, so that those 2^32 times smaller are not 0.
_LARGEST_EXPONENT = 8
# Fewer multiplications than this do not pay for waking other threads.
_PARALLEL_WORK = 1 << 15


class _Weight(ctypes.Structure):
    """`Weight` of the C source."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "minimums", "factors", "levels")),
        *((name, ctypes.c_int64) for name in ("n", "k", "group", "bits")),
        ("zero", ctypes.c_float),
    ]


@functools.cache
def _library() -> ctypes.CDLL:
    found, pointer, number = library(), ctypes.c_void_p, ctypes.c_int64
    found.grouped_linear.argtypes = [pointer, pointer, number, pointer, pointer, number, number]
    found.grouped_rows.argtypes = [pointer, pointer, number, pointer]
    found.grouped_linear.restype, found.grouped_rows.restype = ctypes.c_int, None
    return found


def can_pack(k: int, group: int) -> bool:
    """Whether there is a kernel for matrices of k columns in such groups."""
    return k % group == 0 and group % 8 == 0


class PackedMatrix:
    """A matrix as the kernels read it.

    Args:
        codes: [n, k] uint8.
        bits: of a code: at most 4 are kept in 4 bits, others in 8.
        scales: [n, k / group] float32, finite. Kept with 11 bits of precision.
        minimums: as scales; None for 0.
        zero: subtracted from a code's level.
        levels: [16] float32, the values of codes of 4 bits; None if a code is its own value.

    Attributes:
        shape: (n, k).
        nbytes: in memory.

    Raises:
        HostCompileError: see `library`.
    """

    def __init__(
        self,
        codes: Tensor,
        bits: int,
        scales: Tensor,
        minimums: Tensor | None = None,
        zero: float = 0.0,
        levels: Tensor | None = None,
    ) -> None:
        self._library = _library()
        n, k = self.shape = (codes.shape[0], codes.shape[1])
        kept = 4 if bits <= 4 else 8
        factors = _row_factors(scales, minimums)
        self._codes = _packed_codes(codes, kept)
        self._scales = _panels((scales / factors[:, None]).to(torch.float16))
        self._minimums = None
        if minimums is not None:
            self._minimums = _panels((minimums / factors[:, None]).to(torch.float16))
        self._factors = factors
        self._levels = None if levels is None else levels.to(torch.float32).contiguous()
        tensors = (self._codes, self._scales, self._minimums, self._factors, self._levels)
        self.nbytes = sum(tensor.nbytes for tensor in tensors if tensor is not None)
        self._weight = _Weight(
            *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
            n,
            k,
            k // scales.shape[1],
            kept,
            zero,
        )
        self._pointer = ctypes.byref(self._weight)

    def product(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """out = x @ matrix.T + bias.

        Args:
            x: [T, k] float32, contiguous.
            bias: [n] float32, contiguous, or None.
            out: [T, n] float32, of any row stride.
        """
        n, k = self.shape
        num_rows = x.shape[0]  # len() of a tensor takes a microsecond
        threads = torch.get_num_threads() if num_rows * n * k > _PARALLEL_WORK else 1
        done = self._library.grouped_linear(
            self._pointer,
            x.data_ptr(),
            num_rows,
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            out.stride(0),
            threads,
        )
        if not done:
            raise MemoryError(f"no memory for a product of {num_rows} rows")

    def rows(self, index: Tensor) -> Tensor:
        """Rows [m] int64, dequantised: [m, k] float32; NaN of a row that there is not."""
        index = index.contiguous()
        out = torch.empty(index.shape[0], self.shape[1])
        self._library.grouped_rows(self._pointer, index.data_ptr(), index.shape[0], out.data_ptr())
        return out


def _row_factors(scales: Tensor, minimums: Tensor | None) -> Tensor:
    """[n] powers of two by which a row's scales and minimums are divided, for float16's range."""
    largest = scales.abs().amax(1)
    if minimums is not None:
        largest = torch.maximum(largest, minimums.abs().amax(1))
    exponents = torch.frexp(largest)[1]
    return torch.ldexp(torch.ones(len(scales)), exponents - _LARGEST_EXPONENT)


def _packed_codes(codes: Tensor, bits: int) -> Tensor:
    """[panels, k / codes in a word, PANEL] int32."""
    padded = F.pad(codes, (0, 0, 0, -len(codes) % PANEL))
    if bits == 4:
        padded = padded[:, ::2] | padded[:, 1::2] << 4
    words = padded.contiguous().view(torch.int32)
    return words.view(-1, PANEL, words.shape[1]).transpose(1, 2).contiguous()


def _panels(groups: Tensor) -> Tensor:
    """[n, k / group] -> [panels, k / group, PANEL], rows padded with zeros."""
    padded = F.pad(groups, (0, 0, 0, -len(groups) % PANEL))
    return padded.view(-1, PANEL, groups.shape[1]).transpose(1, 2).contiguous()
