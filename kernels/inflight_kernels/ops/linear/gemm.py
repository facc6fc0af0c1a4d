"""Linear layers for many tokens. Shapes: m tokens, k inputs, n rows of the weight.

From 65 tokens on, a linear layer is as much compute-bound as memory-bound. This GEMM keeps Hopper's
tensor cores busy and fuses what a library GEMM leaves to other kernels: an MLP's gate and the
residual. Each sum is accumulated by one thread in a fixed order: results are bitwise reproducible.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from inflight_kernels.ops.linear.operands import (
    MAX_SHARED_BYTES,
    SCALED_OUT_TYPES,
    STAGE_DEPTH_BYTES,
    STORAGE_TYPES,
    Operand,
    check_gate_operands,
    check_linear_operands,
    values_of,
)
from inflight_kernels.ops.linear.scaled_rows import MAX_SETTLED_WIDTH, ScaledRows, settle_rows
from inflight_kernels.runtime.compile import Instantiation
from inflight_kernels.runtime.launch import BYTE_TYPES, is_hopper, kernel, num_multiprocessors
from inflight_kernels.runtime.tensor_map import matrix_map

MIN_TOKENS = 65
"""Below, `inflight_kernels.ops.linear.skinny_gemm` is faster."""

# As in gemm_hopper.cu.
_TOKENS = 128
_GROUPS = 2
_THREADS = (_GROUPS + 1) * 128


@dataclass(frozen=True, slots=True)
class Shape:
    """Tile shape of a cluster of two blocks.

    Attributes:
        rows: weight rows in a block's tile; half of them gate and half up if gated.
        share_weight: whether the blocks share their weight rows, otherwise their tokens.
    """

    rows: int
    share_weight: bool

    @property
    def step_bytes(self) -> int:
        """Shared memory of a pipeline stage, with its barriers."""
        return (_TOKENS + self.rows) * STAGE_DEPTH_BYTES + 16


@dataclass(frozen=True, slots=True)
class Layout:
    """Shared memory of a block.

    Attributes:
        stages: of the pipeline: as many as fit.
        num_bytes: of all.
        box: tokens and columns of a copy of results; None if they are not staged.
    """

    stages: int
    num_bytes: int
    box: tuple[int, int] | None


def layout(shape: Shape, gated: bool, scaled: bool, quantizes: bool = False) -> Layout:
    """Shared memory of a block with tiles of `shape`; see `plan`.

    Args:
        shape: of a block's tile.
        gated, scaled: as for `plan`.
        quantizes: whether results are quantised, and so of 8 bits.
    """
    columns, tokens = shape.rows // 2 if gated else shape.rows, _TOKENS // _GROUPS
    other = 1024
    if scaled:
        other += _GROUPS * (tokens * columns * (1 if quantizes else 2) + 16)
    stages = (MAX_SHARED_BYTES - other) // shape.step_bytes
    box_columns = columns if quantizes else 32 if columns % 32 == 0 else 16
    box = (tokens, box_columns) if scaled else None
    return Layout(stages, other + stages * shape.step_bytes, box)


# Shapes that the kernel is compiled for.
_PLAIN = (Shape(256, True), Shape(256, False))
_GATED = (Shape(256, True), Shape(224, True), Shape(224, False))
# Of 8 bits, gated or not. Their sums take twice the registers, which bounds the rows; as there is
# no other kernel for them, some shapes suit few tokens.
_SCALED = (
    *(Shape(rows, True) for rows in (192, 160, 128, 96, 64)),
    *(Shape(rows, False) for rows in (128, 96, 64)),
)
# What a tile of 8 bits costs before and after its products, as so many more rows of 4096 columns.
_SCALED_OVERHEAD = 32


@dataclass(frozen=True, slots=True)
class Plan:
    """Tiling of a linear layer.

    Attributes:
        shape: of a block's tile.
        tiles: number of cluster tiles that cover the output.
        clusters: launched; cluster c computes tiles c, c + clusters and so on.
    """

    shape: Shape
    tiles: int
    clusters: int

    @property
    def rounds(self) -> int:
        """Tiles of the busiest cluster."""
        return -(-self.tiles // self.clusters)

    @property
    def work(self) -> int:
        """Output elements that the busiest block computes, padding included."""
        return self.rounds * _TOKENS * self.shape.rows


@functools.lru_cache(maxsize=4096)
def plan(m: int, n: int, gated: bool, num_multiprocessors: int, scaled: bool = False) -> Plan:
    """The shape with the least work for the busiest multiprocessor, then with the fewest tiles.

    Args:
        m: tokens.
        n: rows of the weight.
        gated: whether the weight is gate | up.
        num_multiprocessors: of the device.
        scaled: whether x and the weight are quantised.
    """
    shapes = _SCALED if scaled else _shapes(gated)
    plans = (_cut(m, n, gated, shape, num_multiprocessors) for shape in shapes)
    if scaled:
        return min(plans, key=lambda found: found.rounds * (found.shape.rows + _SCALED_OVERHEAD))
    return min(plans, key=lambda found: (found.work, found.tiles))


def _shapes(gated: bool) -> tuple[Shape, ...]:
    return _GATED if gated else _PLAIN


def _cut(m: int, n: int, gated: bool, shape: Shape, num_multiprocessors: int) -> Plan:
    width, columns = (n // 2, shape.rows // 2) if gated else (n, shape.rows)
    tokens = _TOKENS
    if shape.share_weight:
        tokens *= 2
    else:
        columns *= 2
    tiles = -(-m // tokens) * -(-width // columns)
    return Plan(shape, tiles, min(num_multiprocessors // 2, tiles))


# Below these, cuBLAS was at least as fast.
_MIN_UTILIZATION = 0.86
_MIN_COLUMNS = 2048


def utilization(m: int, n: int, gated: bool, num_multiprocessors: int) -> float:
    """Fraction of the tensor cores' time spent on valid output elements."""
    work = plan(m, n, gated, num_multiprocessors).work
    return m * n / (num_multiprocessors * work)


def prefers(m: int, n: int, k: int, gated: bool, float32_out: bool) -> bool:
    """Whether `linear` is faster than cuBLAS with a separate gate, on this device.

    A heuristic from measurements on an H200. Gated products are faster, unless many tiles are
    partly empty. Up to 128 tokens the time is bound by reading the weight, and empty rows cost
    nothing; there, plain products into float32 are faster as well.

    Args:
        m: tokens.
        n, k: of the weight.
        gated: whether the weight is gate | up.
        float32_out: whether the result is stored as float32.
    """
    if m < MIN_TOKENS or k < _MIN_COLUMNS or k % 8 or n % 16 or not is_hopper():
        return False
    if not gated and not (float32_out and m <= _TOKENS):
        return False
    return utilization(max(m, _TOKENS), n, gated, num_multiprocessors()) >= _MIN_UTILIZATION


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
        x: [m, k], bfloat16, float16 or quantised; the stride of rows is a multiple of 8 values.
        weight: [n, k], quantised if x is; n, half of it when gated, and k are multiples of 8, or k
            of 16 if it is quantised.
        bias: [n].
        residual: [m, n], or [m, n / 2] when gated; may be out.
        out: of the residual's shape; of x's type or float32, float32 only when not gated;
            bfloat16 if x is quantised, as bias and residual then are.
        gated: the weight is gate | up, and out is silu(gate) * up (arXiv:2002.05202).
        pdl: see `Kernel`. The first stages of the weights are read during the preceding kernel.

    Raises:
        ValueError: wrong shape, type or alignment of an operand.
        RuntimeError: not a Hopper GPU.
    """
    m, n, k, storage, out_type, value_type, scales, depth = check_linear_operands(
        x, weight, bias, residual, out, gated=gated, whole_vectors=True
    )
    if not m or not n:
        return
    if not is_hopper():
        raise RuntimeError("this kernel requires a Hopper GPU; see `prefers`")
    cut = plan(m, n, gated, num_multiprocessors(), bool(scales))
    shape = cut.shape
    sizes = layout(shape, gated, bool(scales))
    if scales:
        name = _scaled_name(shape, value_type, storage, gated)
    else:
        name = _name(shape, storage, out_type, gated)
    kernel("gemm_hopper", name)(
        2 * cut.clusters,
        _THREADS,
        *_operand_maps(shape, values_of(x), values_of(weight), depth),
        *scales,
        0 if bias is None else bias,
        *_results(residual, out, sizes.box),
        m,
        n,
        k,
        shared=sizes.num_bytes,
        pdl=pdl,
    )


def can_quantize_gate(n: int) -> bool:
    """Whether `quantizing_gate` supports a weight with so many rows."""
    return n % 32 == 0 and n // 2 <= MAX_SETTLED_WIDTH


def quantizing_gate(
    x: ScaledRows,
    weight: ScaledRows,
    bias: Tensor | None = None,
    *,
    out: ScaledRows,
    codes: Tensor,
    pdl: bool = False,
) -> None:
    """silu(gate) * up, where gate | up = x @ weight.T + bias, quantised by rows.

    A row's scale is the least of the coarse ones (eight_bit.cuh) with which no value is above 448.
    Each tile of the product quantises its columns of a row by the largest of these alone, and a
    second kernel gives all of them the row's scale (`settle_rows`). So a row is not read again to
    be quantised, unless its tiles differ.

    Args:
        x: [m, k] of e4m3.
        weight: [n, k] of e4m3, gate | up, k a multiple of 16; see `can_quantize_gate`.
        bias: [n] bfloat16.
        out: [m, n / 2] of e4m3; not the memory of x.
        codes: at least num_codes(m, n / 2) bytes, uint8; overwritten.
        pdl: see `Kernel`.

    Raises:
        ValueError: wrong shape, type or alignment of an operand.
        RuntimeError: not a Hopper GPU.
    """
    m, n, k, storage = check_gate_operands(x, weight, bias, out)
    if not m:
        return
    if not is_hopper():
        raise RuntimeError("this kernel requires a Hopper GPU")
    cut = plan(m, n, True, num_multiprocessors(), scaled=True)
    shape, part = cut.shape, cut.shape.rows // 2
    of_parts = _codes_of_parts(codes, m, -(-(n // 2) // part))
    sizes = layout(shape, gated=True, scaled=True, quantizes=True)
    assert sizes.box is not None, "results of 8 bits are staged"
    kernel("gemm_hopper", _quantizing_name(shape, storage))(
        2 * cut.clusters,
        _THREADS,
        *_operand_maps(shape, x.values, weight.values, STAGE_DEPTH_BYTES),
        x.scales,
        weight.scales,
        0 if bias is None else bias,
        matrix_map(out.values, sizes.box, 128, swizzles=False),
        of_parts,
        m,
        n,
        k,
        shared=sizes.num_bytes,
        pdl=pdl,
    )
    settle_rows(out, of_parts, part, pdl=pdl)


def _codes_of_parts(codes: Tensor, m: int, parts: int) -> Tensor:
    """The first of them as [m, parts]."""
    if codes.dtype != torch.uint8 or codes.dim() != 1 or len(codes) < parts * m:
        raise ValueError(
            f"codes is {codes.dtype} {list(codes.shape)}; expected at least {parts * m} bytes"
        )
    return codes[: m * parts].view(m, parts)


def _operand_maps(shape: Shape, x: Tensor, weight: Tensor, depth: int) -> tuple[object, object]:
    """The kernels' arguments for x and the weight; `depth`: columns of a stage."""
    tokens = _TOKENS if shape.share_weight else _TOKENS // 2
    return (
        matrix_map(x, (tokens, depth), 256),
        matrix_map(weight, (shape.rows // 2, depth), 256),
    )


def _results(
    residual: Tensor | None, out: Tensor, box: tuple[int, int] | None
) -> tuple[object, ...]:
    """The kernel's arguments for where results go."""
    if box is None:
        return 0 if residual is None else residual, out
    added = matrix_map(out if residual is None else residual, box, 128)
    return added, int(residual is not None), matrix_map(out, box, 128)


def _name(shape: Shape, storage: str, out_type: str, gated: bool) -> str:
    flags = ", ".join(str(flag).lower() for flag in (gated, shape.share_weight))
    stages = layout(shape, gated, scaled=False).stages
    return f"gemm::gemm<{storage}, {out_type}, {shape.rows}, {stages}, {flags}>"


def _scaled_name(shape: Shape, value_type: str, storage: str, gated: bool) -> str:
    flags = ", ".join(str(flag).lower() for flag in (gated, shape.share_weight))
    stages = layout(shape, gated, scaled=True).stages
    return f"gemm::scaled_gemm<{value_type}, {storage}, {shape.rows}, {stages}, {flags}>"


def _quantizing_name(shape: Shape, storage: str) -> str:
    stages = layout(shape, gated=True, scaled=True, quantizes=True).stages
    share_weight = str(shape.share_weight).lower()
    return f"gemm::quantizing_gate<{storage}, {shape.rows}, {stages}, {share_weight}>"


def instantiations() -> list[Instantiation]:
    """All kernels of this module."""
    plain: list[Instantiation] = [
        ("gemm_hopper", (_name(shape, storage, out_type, gated),), ())
        for storage in STORAGE_TYPES.values()
        for gated in (False, True)
        for shape in _shapes(gated)
        for out_type in ((storage,) if gated else (storage, "float"))
    ]
    scaled: list[Instantiation] = [
        ("gemm_hopper", (_scaled_name(shape, value_type, storage, gated),), ())
        for value_type in BYTE_TYPES.values()
        for storage in SCALED_OUT_TYPES.values()
        for gated in (False, True)
        for shape in _SCALED
    ]
    quantizing: list[Instantiation] = [
        ("gemm_hopper", (_quantizing_name(shape, storage),), ())
        for storage in SCALED_OUT_TYPES.values()
        for shape in _SCALED
    ]
    return plain + scaled + quantizing
