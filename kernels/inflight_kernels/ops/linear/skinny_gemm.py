"""Linear layers for few tokens. Shapes: m tokens, k inputs, n rows of the weight.

With at most 64 tokens a linear layer is bound by reading its weights, so this kernel streams them
once and overlaps the rest. Requires a Hopper GPU. The tiling and the order of summation are fixed
by `plan`: results are bitwise reproducible.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from inflight_kernels.ops.linear import few_gemm
from inflight_kernels.ops.linear.operands import (
    MAX_SHARED_BYTES,
    SCALED_OUT_TYPES,
    STAGE_DEPTH_BYTES,
    STORAGE_TYPES,
    LinearOperands,
    NormedRows,
    Operand,
    SummedRows,
    check_linear_operands,
    check_quantizing_operands,
    values_of,
)
from inflight_kernels.ops.linear.scaled_rows import QUANTIZING_TYPES, ScaledRows
from inflight_kernels.runtime.compile import Instantiation
from inflight_kernels.runtime.launch import (
    BYTE_TYPES,
    check,
    is_hopper,
    kernel,
    num_multiprocessors,
)
from inflight_kernels.runtime.tensor_map import matrix_map

MAX_TOKENS = 64

MAX_QUANTIZED_TOKENS = 4
"""For `quantizing_linear`: each block reads all of x, which with more tokens takes longer than a
kernel of its own."""

# As in skinny_gemm.cu.
_THREADS = 160
_QUANTIZING_THREADS = 288
_TOKENS = 64

# Rows of x that a stage has for up to as many tokens.
_FEW_TOKENS = 8

# Of a block: with few tokens at most, and in any case, more than half of what a multiprocessor has.
# Measured on an H200 (benchmarks/notes.md).
_FEW_SHARED_BYTES = 118 * 1024
_LEAST_SHARED_BYTES = 114 * 1024
_FEWEST_STAGES = 5

# Of `quantizing_linear`: stages of x that it has room for, and sums over rows of x.
_QUANTIZED_STEPS = 64
_ROW_SUMS_BYTES = 512

# Tile rows that the kernel is compiled for, for a pair of blocks and for one.
_PAIR_ROWS = (32, 48, 64, 80, 96, 112, 128)
_BLOCK_ROWS = (80, 96, 112, 128, 144)


class Ring(NamedTuple):
    """Of a block, in shared memory.

    Attributes:
        stages: of the pipeline.
        shared_bytes: of a block, with what else it has there.
        is_whole: whether there is a stage for each step of the block. Then products in 8 bits ask
            for the carveout, so that blocks of the next kernels start beside them: mixtures of
            experts gain 1 % by that. Larger products do not, nor do those of 16 bits, which use all
            of the memory's bandwidth.
    """

    stages: int
    shared_bytes: int
    is_whole: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """Tiling of a linear layer.

    Attributes:
        rows: weight rows in a tile; half of them gate and half up if gated.
        pair: whether a cluster of two blocks computes a tile, each block half of its columns.
        tiles: number of tiles that cover the weight.
        blocks: launched; block b computes tiles b, b + blocks and so on, pair b only tile b.
    """

    rows: int
    pair: bool
    tiles: int
    blocks: int

    def steps(self, k_bytes: int) -> int:
        """Of a block for a tile; a block of a pair has half of the columns."""
        steps = -(-k_bytes // STAGE_DEPTH_BYTES)
        return -(-steps // 2) if self.pair else steps

    def ring(self, m: int, k_bytes: int, *, quantizes: bool = False) -> Ring:
        """The ring of a block.

        More than half of the memory of a multiprocessor, so that it has one block, even of a kernel
        launched before the preceding one has ended: with room for two, some multiprocessors got
        both and others none. With few tokens not all of it, so that blocks of attention or of a
        router, the kernels before and after, run beside it. No more stages than a block has steps.

        Args:
            m: tokens.
            k_bytes: of a row of x, as it is multiplied.
            quantizes: whether the block quantises x, which then is in memory of its own.
        """
        of_tile = self.steps(k_bytes)
        is_few = m <= _FEW_TOKENS
        x_rows = 0 if quantizes else _FEW_TOKENS if is_few else _TOKENS
        barrier_bytes = 16 if quantizes else 24
        stage_bytes = (self.rows + x_rows) * STAGE_DEPTH_BYTES + barrier_bytes
        # Sums of a pair's other block, or of few tokens.
        other_bytes = 1024 + self.rows * (128 if self.pair else 32)
        if quantizes:
            other_bytes += of_tile * _FEW_TOKENS * STAGE_DEPTH_BYTES + _ROW_SUMS_BYTES
        limit = _FEW_SHARED_BYTES if is_few else MAX_SHARED_BYTES
        fitting = max((limit - other_bytes) // stage_bytes, _FEWEST_STAGES)
        of_block = of_tile * -(-self.tiles // self.blocks)
        stages = min(fitting, of_block)
        shared_bytes = max(other_bytes + stages * stage_bytes, _LEAST_SHARED_BYTES)
        return Ring(stages, shared_bytes, stages == of_block)


@functools.lru_cache(maxsize=4096)
def plan(n: int, num_multiprocessors: int) -> Plan:
    """The fewest rows such that each pair of blocks has at most one tile, or else such that the
    maximum number of tiles per block is minimal.

    Args:
        n: rows of the weight.
        num_multiprocessors: of the device.
    """
    for rows in _PAIR_ROWS:
        tiles = -(-n // rows)
        if tiles <= num_multiprocessors // 2:
            return Plan(rows, True, tiles, 2 * tiles)
    rounds = -(-n // (_BLOCK_ROWS[-1] * num_multiprocessors))
    rows = next(rows for rows in _BLOCK_ROWS if n <= rows * rounds * num_multiprocessors)
    tiles = -(-n // rows)
    return Plan(rows, False, tiles, min(num_multiprocessors, tiles))


def prefers(m: int, n: int, k: int) -> bool:
    """Whether `linear` is faster than cuBLAS for a product of this shape, on this device.

    Measured on an H200 in chains of qkv, o, gate | up and down of an 8B Llama in bfloat16, with
    programmatic dependent launch: 108 us per layer with 1 token, 110 with 16, 114 with 32 and 122
    with 64. cuBLAS, in other runs, took 123, 130, 134 and 136 to 140. With 64 tokens the device is
    at its power limit.
    """
    return 1 <= m <= MAX_TOKENS and k % 8 == 0 and is_hopper()


def linear(
    x: Operand,
    weight: Operand,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    out: Tensor,
    gated: bool = False,
    pdl: bool = False,
) -> None:
    """x @ weight.T + bias, gated or not, + residual -> out, accumulated in float32.

    Args:
        x: [m, k], m <= MAX_TOKENS; the stride of rows is a multiple of 8 values.
        weight: [n, k], k a multiple of 8, or of 16 if it is quantised; x is, too, if it is.
        bias: [n].
        residual: [m, n], or [m, n / 2] when gated; may be out.
        out: of the residual's shape; of x's type or float32, float32 only when not gated;
            bfloat16 if x is quantised, as bias and residual then are.
        gated: the weight is gate | up, and out is silu(gate) * up (arXiv:2002.05202).
        pdl: see `Kernel`. The first stages of the weights are read during the preceding kernel,
            which must not write them.

    Raises:
        ValueError: wrong shape, type or alignment of an operand.
        RuntimeError: not a Hopper GPU.
    """
    operands = check_linear_operands(
        x, weight, bias, residual, out, gated=gated, whole_vectors=False, max_tokens=MAX_TOKENS
    )
    m, n, k, *_ = operands
    if not m or not n:
        return
    if not is_hopper():
        raise RuntimeError("this kernel requires a Hopper GPU; see `prefers`")
    is_few = not gated and few_gemm.prefers(m, n, k)
    if is_few and isinstance(x, Tensor) and isinstance(weight, Tensor):
        few_gemm.launch(operands, x, weight, bias, residual, out, pdl=pdl)
    else:
        _launch(operands, x, weight, bias, residual, out, gated=gated, pdl=pdl)


def _launch(
    operands: LinearOperands,
    x: Operand,
    weight: Operand,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    *,
    gated: bool,
    pdl: bool,
) -> None:
    """`linear` of operands that have been checked, by skinny_gemm.cu."""
    m, n, k, storage, out_type, value_type, scales, depth = operands
    cut = plan(n, num_multiprocessors())
    if scales:
        name = _scaled_name(cut.rows, cut.pair, (value_type, storage), gated)
    else:
        name = _name(cut.rows, cut.pair, storage, out_type, gated)
    ring = cut.ring(m, k * values_of(x).itemsize)
    kernel("skinny_gemm", name)(
        cut.blocks,
        _THREADS,
        matrix_map(values_of(x), (-(-m // 8) * 8, depth), 128),
        matrix_map(values_of(weight), (cut.rows // 2, depth), 128),
        *scales,
        0 if bias is None else bias,
        0 if residual is None else residual,
        out,
        m,
        n,
        k,
        ring.stages,
        shared=ring.shared_bytes,
        pdl=pdl,
    )


def can_quantize(m: int, n: int, k: int) -> bool:
    """Whether `quantizing_linear` supports a product of this shape, on this device."""
    if not 1 <= m <= MAX_QUANTIZED_TOKENS or k % 16 or not is_hopper():
        return False
    return plan(n, num_multiprocessors()).steps(k) <= _QUANTIZED_STEPS


def quantizing_linear(
    x: Tensor | NormedRows,
    weight: ScaledRows,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    out: Tensor,
    gated: bool = False,
    pdl: bool = False,
) -> None:
    """`linear` with x quantised by rows on the way, and spread as the weight is, after a norm if
    that is x.

    Each block quantises x for itself while its first weights are read. That saves the launches of
    a norm and of a quantisation, which with few tokens take longer than their work.

    Args:
        x: [m, k] bfloat16; see `can_quantize`.
        weight, bias, residual, out, gated, pdl: as in `linear`.

    Raises:
        ValueError: wrong shape, type or alignment of an operand.
        RuntimeError: not a Hopper GPU.
    """
    m, n, k, storage, _, value_type, *_ = check_quantizing_operands(
        x, weight, bias, residual, out, gated=gated
    )
    if not m or not n:
        return
    if not is_hopper():
        raise RuntimeError("this kernel requires a Hopper GPU; see `can_quantize`")
    if not can_quantize(m, n, k):
        raise ValueError(
            f"x is [{m}, {k}]; allowed: up to {MAX_QUANTIZED_TOKENS} rows; see `can_quantize`"
        )
    rows, norm, eps = x if isinstance(x, NormedRows) else (x, 0, 0.0)
    cut = plan(n, num_multiprocessors())
    name = _quantizing_name(cut.rows, cut.pair, (value_type, storage), gated, weight.spreads)
    ring = cut.ring(m, k, quantizes=True)
    kernel("skinny_gemm", name)(
        cut.blocks,
        _QUANTIZING_THREADS,
        rows,
        rows.stride(0),
        norm,
        eps,
        matrix_map(weight.values, (cut.rows // 2, STAGE_DEPTH_BYTES), 128),
        weight.scales,
        0 if bias is None else bias,
        0 if residual is None else residual,
        out,
        m,
        n,
        k,
        ring.stages,
        weight.spread_bits,
        shared=ring.shared_bytes,
        pdl=pdl,
        max_carveout=ring.is_whole,
    )


def summing_linear(
    x: SummedRows,
    weight: ScaledRows,
    bias: Tensor | None = None,
    *,
    out: Tensor,
    pdl: bool = False,
) -> None:
    """`quantizing_linear` of the norm of a sum, which is written on the way.

    Args:
        x: [m, k]; see `can_quantize`.
        weight, bias, out, pdl: as in `linear`.

    Raises:
        ValueError: wrong shape, type or alignment of an operand.
        RuntimeError: not a Hopper GPU.
    """
    normed = NormedRows(x.rows, x.weight, x.eps)
    m, n, k, storage, _, value_type, *_ = check_quantizing_operands(
        normed, weight, bias, None, out, gated=False
    )
    for name, sums in (("residual", x.residual), ("total", x.total)):
        check(name, sums, (m, k), torch.float32)
    if not is_hopper():
        raise RuntimeError("this kernel requires a Hopper GPU; see `can_quantize`")
    if not can_quantize(m, n, k):
        raise ValueError(
            f"x is [{m}, {k}]; allowed: 1 to {MAX_QUANTIZED_TOKENS} rows; see `can_quantize`"
        )
    cut = plan(n, num_multiprocessors())
    ring = cut.ring(m, k, quantizes=True)
    kernel_name = _summing_name(cut.rows, cut.pair, (value_type, storage), weight.spreads)
    kernel("skinny_gemm", kernel_name)(
        cut.blocks,
        _QUANTIZING_THREADS,
        x.rows,
        x.rows.stride(0),
        x.residual,
        x.total,
        x.weight,
        x.eps,
        matrix_map(weight.values, (cut.rows // 2, STAGE_DEPTH_BYTES), 128),
        weight.scales,
        0 if bias is None else bias,
        out,
        m,
        n,
        k,
        ring.stages,
        weight.spread_bits,
        shared=ring.shared_bytes,
        pdl=pdl,
        max_carveout=ring.is_whole,
    )


def _name(rows: int, pair: bool, storage: str, out_type: str, gated: bool) -> str:
    kind = "skinny_gemm_pairs" if pair else "skinny_gemm"
    return f"{kind}<{storage}, {out_type}, {rows}, {'true' if gated else 'false'}>"


def _scaled_name(rows: int, pair: bool, types: tuple[str, str], gated: bool) -> str:
    kind = "scaled_skinny_gemm_pairs" if pair else "scaled_skinny_gemm"
    return f"{kind}<{', '.join(types)}, {rows}, {'true' if gated else 'false'}>"


def _quantizing_name(
    rows: int, pair: bool, types: tuple[str, str], gated: bool, spreads: str
) -> str:
    kind = "quantizing_skinny_gemm_pairs" if pair else "quantizing_skinny_gemm"
    return f"{kind}<{', '.join(types)}, {rows}, {'true' if gated else 'false'}{spreads}>"


def _summing_name(rows: int, pair: bool, types: tuple[str, str], spreads: str) -> str:
    kind = "summing_skinny_gemm_pairs" if pair else "summing_skinny_gemm"
    return f"{kind}<{', '.join(types)}, {rows}{spreads}>"


def instantiations() -> list[Instantiation]:
    """All kernels of this module."""
    shapes = [(rows, True) for rows in _PAIR_ROWS] + [(rows, False) for rows in _BLOCK_ROWS]
    plain = [
        tuple(
            _name(rows, pair, storage, out_type, gated)
            for out_type, gated in ((storage, False), (storage, True), ("float", False))
        )
        for storage in STORAGE_TYPES.values()
        for rows, pair in shapes
    ]
    scaled = [
        tuple(_scaled_name(rows, pair, (value_type, storage), gated) for gated in (False, True))
        for value_type in BYTE_TYPES.values()
        for storage in SCALED_OUT_TYPES.values()
        for rows, pair in shapes
    ]
    quantizing = [
        (
            *(
                _quantizing_name(rows, pair, (value_type, storage), gated, spreads)
                for gated in (False, True)
            ),
            _summing_name(rows, pair, (value_type, storage), spreads),
        )
        for value_type, spreads in QUANTIZING_TYPES
        for storage in SCALED_OUT_TYPES.values()
        for rows, pair in shapes
    ]
    return [("skinny_gemm", names, ()) for names in plain + scaled + quantizing]
