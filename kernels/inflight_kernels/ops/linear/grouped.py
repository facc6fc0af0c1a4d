"""Linear layers whose weight has 4, 6 or 8 bits a value and scales of groups, on any GPU; x has 16.

Shapes: m tokens, k inputs, n rows of the weight. For few tokens kernels stream the weight once;
`grouped_gemm` multiplies more of them on Hopper, and `dequantize` writes the weight in 16 bits for
a product of those. All multiply with the same values. The tiling and the order of summation are
fixed by `plan`: results are bitwise reproducible.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from inflight_kernels.ops.linear.grouped_rows import (
    KINDS,
    RECORD_COLUMNS,
    RECORD_ROWS,
    GroupedKind,
    GroupedRows,
)
from inflight_kernels.ops.linear.operands import MAX_SHARED_BYTES, check_grouped_operands
from inflight_kernels.runtime.compile import Instantiation
from inflight_kernels.runtime.launch import check, is_hopper, kernel, num_multiprocessors

MAX_TOKENS = 8

# Of a block. They share x in shared memory and the columns of a tile.
_WARPS = 16
_THREADS = 32 * _WARPS
_DEPTH = 2  # records of each tile that a warp loads ahead

_COLUMNS = 8  # of a product: tokens, or their planes

_DEQUANTIZING_WARPS = 8
_DEQUANTIZED_PITCH = 2 * RECORD_COLUMNS + 16

# As in grouped_planes.cuh.
_PLANE_COLUMNS = 256
_PLANE_TOKENS = 4

# Of x in shared memory, so that several blocks fit on a multiprocessor.
_MAX_X_BYTES = 72 * 1024


def _whole_planes(k: int) -> int:
    """Columns of x in shared memory if it has all of them."""
    return -(-k // _PLANE_COLUMNS) * _PLANE_COLUMNS


def _x_pitch(columns: int) -> int:
    return 2 * columns + 32


def _planes_bytes(columns: int, kind: GroupedKind) -> int:
    """Of x in shared memory, in planes: their scales, and sums of groups."""
    return 4 * _COLUMNS * (columns // _PLANE_COLUMNS + columns // kind.group)


@dataclass(frozen=True, slots=True)
class Tile:
    """What a block computes, and how.

    Attributes:
        in_planes: whether a token is two columns of a product (grouped_planes.cuh).
        tiles: of RECORD_ROWS rows of the weight; half of them gate and half up if gated.
    """

    in_planes: bool
    tiles: int

    def phase(self, m: int, k: int) -> int:
        """Columns of x that are in shared memory at once."""
        whole = _whole_planes(k)
        if m * _x_pitch(whole) <= _MAX_X_BYTES:
            return whole
        unit = RECORD_COLUMNS * _WARPS * _DEPTH
        return max(_MAX_X_BYTES // (2 * m) // unit, 1) * unit

    def shared_bytes(self, m: int, k: int, kind: GroupedKind) -> int:
        """Dynamic shared memory of a block for m tokens."""
        phase = self.phase(m, k)
        sums = 4 * _WARPS * _COLUMNS * (self.tiles * RECORD_ROWS + 4)
        planes = _planes_bytes(phase, kind) if self.in_planes else 0
        return 2 * sums + m * _x_pitch(phase) + planes

    def blocks(self, n: int, num_multiprocessors: int) -> int:
        """To launch for a weight with n rows."""
        tiles = -(-n // (self.tiles * RECORD_ROWS))
        return min(tiles, num_multiprocessors)


def tiles_of(kind: GroupedKind) -> tuple[Tile, ...]:
    """Those that the kernel is compiled for."""
    ways = (False, True) if kind.is_integer else (False,)
    return tuple(Tile(in_planes, tiles) for in_planes in ways for tiles in (1, 2))


_MANY_COLUMNS = 8192


@functools.lru_cache(maxsize=4096)
def plan(m: int, k: int, gated: bool, is_integer: bool) -> Tile:
    """The tile of a product; chosen by measurements on an H200 (benchmarks/notes.md).

    Args:
        m: tokens, up to MAX_TOKENS.
        k: columns of the weight.
        gated: whether the weight is gate | up.
        is_integer: whether its codes are.
    """
    # More tokens would be two products in planes, which take longer than one that is not.
    one, two = (Tile(is_integer and m <= _PLANE_TOKENS, tiles) for tiles in (1, 2))
    # With two tiles, x is read half as often, which counts if it does not stay in shared memory.
    return two if gated or k >= _MANY_COLUMNS or one.phase(m, k) < k else one


MAX_STREAMED_TOKENS = 2
"""Of any weight. Of one whose tiles are no more than the multiprocessors, and whose product is thus
bound by latencies, up to MAX_TOKENS, none of them in planes, which take longer to make than to
multiply."""
MAX_STREAM_BYTES = 96 * 1024
"""Of shared memory: what every GPU has; Hopper GPUs have MAX_SHARED_BYTES. A product that needs
more, as of an output layer, has a tile of `plan`."""

_STREAM_STEM = "grouped_stream"
_STREAM_DEPTH = 4  # records that a warp loads ahead; more gained nothing


class Stream(NamedTuple):
    """A launch of the kernel whose blocks share the tiles evenly.

    Attributes:
        in_planes: see `Tile`.
        blocks: to launch.
        shared_bytes: of dynamic shared memory.
    """

    in_planes: bool
    blocks: int
    shared_bytes: int


def stream(
    m: int,
    n: int,
    k: int,
    kind: GroupedKind,
    gated: bool,
    num_multiprocessors: int,
    max_bytes: int = MAX_STREAM_BYTES,
) -> Stream | None:
    """The launch for a product; None if it has too many tokens, or sums for so many bytes of shared
    memory."""
    halves = 2 if gated else 1
    tiles = -(-n // (halves * RECORD_ROWS))
    blocks = min(tiles, num_multiprocessors)
    is_small = blocks == tiles
    in_planes = kind.is_integer and not is_small
    columns = _whole_planes(k)
    parts = 2 if in_planes else 1
    sums = -(-tiles // blocks) * halves * _WARPS * m * parts * (RECORD_ROWS + 4)
    planes = _planes_bytes(columns, kind) if in_planes else 0
    shared_bytes = m * _x_pitch(columns) + planes + 4 * sums
    fits = m <= (MAX_TOKENS if is_small else MAX_STREAMED_TOKENS)
    fits = fits and shared_bytes <= max_bytes
    return Stream(in_planes, blocks, shared_bytes) if fits else None


def linear(
    x: Tensor,
    weight: GroupedRows,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    out: Tensor,
    gated: bool = False,
    num_tokens: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """x @ weight.T + bias, gated or not, + residual -> out, accumulated in float32.

    Args:
        x: [m, k] bfloat16, m <= MAX_TOKENS; the stride of rows is a multiple of 8.
        weight: [n, k]; k is a multiple of 8.
        bias: [n] bfloat16.
        residual: [m, n], or [m, n / 2] when gated, bfloat16; may be out.
        out: of the residual's shape, bfloat16, or float32 when not gated.
        gated: the weight is gate | up, n / 2 a multiple of RECORD_ROWS, and out is silu(gate) * up
            (arXiv:2002.05202).
        num_tokens: [1] int32, history_ready (see common.cuh): the rows of x that count, at least
            one. The kernel that streams the weight leaves out the others, whose rows of `out` keep
            their values. None if all count.
        pdl: see `Kernel`. The first stages of the weight are read during the preceding kernel,
            which must not write them.

    Raises:
        ValueError: wrong shape, type or alignment of an operand.
    """
    m, n, k = check_grouped_operands(
        x, weight, bias, residual, out, gated=gated, max_tokens=MAX_TOKENS
    )
    if num_tokens is not None:
        check("num_tokens", num_tokens, (1,), torch.int32, vectors=False)
    if not m or not n:
        return
    found = _launch_of(m, n, k, weight.kind, gated)
    kernel(found.stem, found.name)(
        found.blocks,
        _THREADS,
        x,
        x.stride(0),
        weight.records,
        0 if weight.table is None else weight.table,
        0 if bias is None else bias,
        0 if residual is None else residual,
        out,
        m,
        n,
        k,
        *(() if found.streams else (found.phase,)),
        gated,
        out.dtype == torch.float32,
        *((0 if num_tokens is None or m == 1 else num_tokens,) if found.streams else ()),
        shared=found.shared_bytes,
        pdl=pdl,
        max_carveout=found.streams,  # for the next product, which reads its weight early
    )


class _Launch(NamedTuple):
    """Of a product. phase: columns of x at once; the kernel that streams has all of them."""

    stem: str
    name: str
    blocks: int
    phase: int
    shared_bytes: int

    @property
    def streams(self) -> bool:
        return self.stem == _STREAM_STEM


def _launch_of(m: int, n: int, k: int, kind: GroupedKind, gated: bool) -> _Launch:
    multiprocessors = num_multiprocessors()
    max_bytes = MAX_SHARED_BYTES if is_hopper() else MAX_STREAM_BYTES
    streamed = stream(m, n, k, kind, gated, multiprocessors, max_bytes)
    if streamed is not None:
        in_planes, blocks, shared_bytes = streamed
        return _Launch(_STREAM_STEM, _stream_name(kind, in_planes), blocks, k, shared_bytes)
    tile = plan(m, k, gated, kind.is_integer)
    return _Launch(
        "grouped_gemm",
        _name(kind, tile),
        tile.blocks(n, multiprocessors),
        tile.phase(m, k),
        tile.shared_bytes(m, k, kind),
    )


def dequantize(weight: GroupedRows, *, out: Tensor) -> None:
    """weight -> out, the values that products have.

    The next kernel must not be a dependent launch that reads out before it waits, as linear layers
    read weights.

    Args:
        weight: [n, k]; k is a multiple of 8.
        out: [n, k] bfloat16.

    Raises:
        ValueError: wrong shape, type or alignment of an operand.
    """
    weight.check("weight", *out.shape)
    check("out", out, (weight.n, weight.k), torch.bfloat16)
    num_records = weight.records.shape[0] * weight.records.shape[1]
    if not num_records:
        return
    per_warp = weight.kind.record_bytes + RECORD_ROWS * _DEQUANTIZED_PITCH
    kernel("grouped_gemm", _dequantizing_name(weight.kind))(
        -(-num_records // _DEQUANTIZING_WARPS),
        32 * _DEQUANTIZING_WARPS,
        weight.records,
        0 if weight.table is None else weight.table,
        out,
        weight.n,
        weight.k,
        shared=_DEQUANTIZING_WARPS * per_warp,
    )


def _name(kind: GroupedKind, tile: Tile) -> str:
    way = str(tile.in_planes).lower()
    return f"grouped_gemm<{kind.name}, {way}, {tile.tiles}, {_WARPS}, {_DEPTH}>"


def _stream_name(kind: GroupedKind, in_planes: bool) -> str:
    return f"{_STREAM_STEM}<{kind.name}, {str(in_planes).lower()}, {_WARPS}, {_STREAM_DEPTH}>"


def _dequantizing_name(kind: GroupedKind) -> str:
    return f"grouped_dequantize<{kind.name}>"


def instantiations() -> list[Instantiation]:
    """All kernels of this module."""
    found: list[Instantiation] = []
    for kind in KINDS:
        names = *(_name(kind, tile) for tile in tiles_of(kind)), _dequantizing_name(kind)
        ways = sorted({tile.in_planes for tile in tiles_of(kind)})
        streams = tuple(_stream_name(kind, in_planes) for in_planes in ways)
        found += [("grouped_gemm", names, ()), (_STREAM_STEM, streams, ())]
    return found
