"""Linear layers whose weight has 8 bits a value while x has 16 (W8A16), on any GPU.

Shapes: m tokens, k inputs, n rows of the weight. For few tokens a kernel streams the weight once
and widens its bytes in registers; for more, `dequantize` writes it in 16 bits for a product of
those. The tiling and the order of summation are fixed by `plan`: results are bitwise reproducible.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from torch import Tensor

from inflight_kernels.ops.linear.operands import (
    STORAGE_TYPES,
    check_dequantized,
    check_weight_only_operands,
)
from inflight_kernels.ops.linear.scaled_rows import ScaledRows
from inflight_kernels.runtime.compile import Instantiation
from inflight_kernels.runtime.launch import (
    BYTE_TYPES,
    VECTOR_BYTES,
    kernel,
    num_multiprocessors,
)

MAX_TOKENS = 64

# As in weight_only.cu.
_DEPTH = 64

_DEQUANTIZING_THREADS = 256
_VECTORS_PER_THREAD = 4

# Of the multiprocessors, so many need a tile; those that remain idle do not bound a kernel that
# waits for memory.
_MIN_BUSY = 0.75


@dataclass(frozen=True, slots=True)
class Tile:
    """What a block computes, and how.

    Attributes:
        rows: of the weight; half of them gate and half up if gated.
        tokens: of x, padding included.
        warps: which share the columns.
        stages: in the ring of each warp.
    """

    rows: int
    tokens: int
    warps: int
    stages: int

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block; at most 99 KiB, what any GPU has."""
        return self.warps * self.stages * (self.rows + 2 * self.tokens) * _DEPTH


# Tiles that the kernel is compiled for, by tokens. With few rows there are more blocks, and with
# many x is read less often, which takes as long as to read the weight if it has as many bytes. Sums
# of more rows do not fit into registers with 64 tokens.
_TILES = (
    (Tile(32, 8, 8, 3), Tile(16, 8, 8, 3)),
    (Tile(64, 16, 4, 3), Tile(32, 16, 4, 3)),
    (Tile(64, 32, 4, 3), Tile(32, 32, 4, 3)),
    (Tile(48, 64, 4, 2), Tile(32, 64, 4, 2)),
)


@functools.lru_cache(maxsize=4096)
def plan(m: int, n: int, num_multiprocessors: int) -> Tile:
    """The most rows with which most multiprocessors have a tile, else the fewest.

    Args:
        m: tokens, up to MAX_TOKENS.
        n: rows of the weight.
        num_multiprocessors: of the device.
    """
    tiles = next(tiles for tiles in _TILES if m <= tiles[0].tokens)
    busy = (tile for tile in tiles if -(-n // tile.rows) >= _MIN_BUSY * num_multiprocessors)
    return next(busy, tiles[-1])


def linear(
    x: Tensor,
    weight: ScaledRows,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    out: Tensor,
    gated: bool = False,
    pdl: bool = False,
) -> None:
    """x @ weight.T + bias, gated or not, + residual -> out, accumulated in float32.

    The scale of a row multiplies its sum. The values of a token do not depend on other tokens, but
    on how many there are.

    Args:
        x: [m, k] bfloat16 or float16, m <= MAX_TOKENS; the stride of rows is a multiple of 8.
        weight: [n, k] e4m3 without NaN, or int8; k is a multiple of 16.
        bias: [n] of x's type.
        residual: [m, n], or [m, n / 2] when gated, of x's type; may be out.
        out: of the residual's shape, of x's type.
        gated: the weight is gate | up, and out is silu(gate) * up (arXiv:2002.05202).
        pdl: see `Kernel`. The first stages of the weight are read during the preceding kernel,
            which must not write them.

    Raises:
        ValueError: wrong shape, type or alignment of an operand.
    """
    m, n, k, storage = check_weight_only_operands(
        x, weight, bias, residual, out, gated=gated, max_tokens=MAX_TOKENS
    )
    if not m or not n:
        return
    tile = plan(m, n, num_multiprocessors())
    kernel("weight_only", _name(BYTE_TYPES[weight.values.dtype], storage, tile))(
        -(-n // tile.rows),
        32 * tile.warps,
        x,
        x.stride(0),
        weight.values,
        weight.scales,
        0 if bias is None else bias,
        0 if residual is None else residual,
        out,
        m,
        n,
        k,
        gated,
        shared=tile.shared_bytes,
        pdl=pdl,
    )


def dequantize(weight: ScaledRows, *, out: Tensor) -> None:
    """weight -> out, each value the product with its scale in float32, rounded once more.

    The next kernel must not be a dependent launch that reads out before it waits, as linear layers
    read weights.

    Args:
        weight: [n, k] e4m3 without NaN, or int8; k is a multiple of 16.
        out: [n, k] bfloat16 or float16.

    Raises:
        ValueError: wrong shape, type or alignment of an operand.
    """
    n, k, storage = check_dequantized(weight, out)
    if not n:
        return
    vectors = n * k // VECTOR_BYTES
    per_block = _DEQUANTIZING_THREADS * _VECTORS_PER_THREAD
    kernel("weight_only", _dequantizing_name(BYTE_TYPES[weight.values.dtype], storage))(
        -(-vectors // per_block),
        _DEQUANTIZING_THREADS,
        weight.values,
        weight.scales,
        out,
        vectors,
        k // VECTOR_BYTES,
    )


def _name(byte: str, storage: str, tile: Tile) -> str:
    return (
        f"weight_only_gemm<{byte}, {storage}, {tile.rows}, {tile.tokens}, {tile.warps}, "
        f"{tile.stages}>"
    )


def _dequantizing_name(byte: str, storage: str) -> str:
    return f"weight_only_dequantize<{byte}, {storage}, {_VECTORS_PER_THREAD}>"


def instantiations() -> list[Instantiation]:
    """All kernels of this module."""
    return [
        (
            "weight_only",
            (
                *(_name(byte, storage, tile) for tiles in _TILES for tile in tiles),
                _dequantizing_name(byte, storage),
            ),
            (),
        )
        for storage in STORAGE_TYPES.values()
        for byte in BYTE_TYPES.values()
    ]
