"""Linear layers for up to 8 tokens, in 16 bits. Shapes: m tokens, k inputs, n rows of the weight.

`skinny_gemm.linear` uses the kernel where it is faster; `norm_linear` has a norm before it. They
require a Hopper GPU. The tiling and the order of summation are fixed by `plan`: results are bitwise
reproducible.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from inflight_kernels.ops.linear.operands import (
    MAX_SHARED_BYTES,
    STAGE_DEPTH_BYTES,
    STORAGE_TYPES,
    LinearOperands,
    NormedRows,
    SummedRows,
    check_linear_operands,
)
from inflight_kernels.runtime.compile import Instantiation
from inflight_kernels.runtime.launch import check, is_hopper, kernel, num_multiprocessors
from inflight_kernels.runtime.tensor_map import box_map

MAX_TOKENS = 8

# As in few_gemm.cu.
_CONSUMERS = 8
_THREADS = (_CONSUMERS + 1) * 32

# Of a block, unless all of its weights fit: room is left for a block of the next kernel, attention
# or a router. And in any case, more than half of what a multiprocessor has, so that it has one
# block. These and the following were measured on an H200 (benchmarks/notes.md).
_SHARED_BYTES = 140 * 1024
_LEAST_SHARED_BYTES = 114 * 1024

_STAGE_BYTES = 6 * 1024
"""Of weights, at most, if a box has not more: a consumer starts when all of them are there. If all
of a block's weights fit, each consumer has one stage for its part of a tile."""

_MAX_INPUTS = 5120
_MAX_X_BYTES = 24 * 1024
"""Of all tokens, which a block has in shared memory beside its ring."""

ROWS = (8, 16, 24, 32, 40, 48, 56)
"""Of a tile, for which the kernel is compiled."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Tiling of a linear layer.

    Attributes:
        rows: weight rows in a tile.
        boxes: of 128 bytes of each row, in a stage of the ring.
        stages: of the ring.
        blocks: launched; block b computes tiles b, b + blocks and so on.
        shared_bytes: dynamic shared memory of a block.
    """

    rows: int
    boxes: int
    stages: int
    blocks: int
    shared_bytes: int


def prefers(m: int, n: int, k: int) -> bool:
    """Whether the kernel supports such a product, and is faster than `skinny_gemm`'s others on this
    device: if each block has one tile. Larger products are bound by memory alone."""
    if m > MAX_TOKENS or k % (STAGE_DEPTH_BYTES // 2):
        return False
    is_small = k <= _MAX_INPUTS and m * k * 2 <= _MAX_X_BYTES
    return is_small and n <= ROWS[-1] * num_multiprocessors()


@functools.lru_cache(maxsize=4096)
def plan(m: int, n: int, k: int, num_multiprocessors: int) -> Plan:
    """The smallest tile with which each block has one, and a ring for all of its weights, or for as
    many as leave room.

    Args:
        m, n, k: of a product that the kernel supports.
        num_multiprocessors: of the device.
    """
    rows = next(rows for rows in ROWS if n <= rows * num_multiprocessors)
    return plan_with(rows, m, n, k, -(-n // rows))


def plan_with(rows: int, m: int, n: int, k: int, blocks: int) -> Plan:
    """The plan with such tiles and so many blocks; see `plan`."""
    box_bytes, all_boxes = rows * STAGE_DEPTH_BYTES, k * 2 // STAGE_DEPTH_BYTES
    other_bytes = m * (k + 8) * 2 + _CONSUMERS * MAX_TOKENS * (1 + rows) * 4 + 8

    def stages_bytes(boxes: int) -> int:
        """A stage for each consumer."""
        return _CONSUMERS * (boxes * box_bytes + 16)

    boxes, rounds = -(-all_boxes // _CONSUMERS), -(-n // (rows * blocks))
    if other_bytes + rounds * stages_bytes(boxes) > MAX_SHARED_BYTES:
        boxes = max(1, min(_STAGE_BYTES // box_bytes, all_boxes // _CONSUMERS))
        rounds = max(1, (_SHARED_BYTES - other_bytes) // stages_bytes(boxes))
    shared_bytes = max(other_bytes + rounds * stages_bytes(boxes), _LEAST_SHARED_BYTES)
    return Plan(rows, boxes, rounds * _CONSUMERS, blocks, shared_bytes)


def launch(
    operands: LinearOperands,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    *,
    pdl: bool,
) -> None:
    """`skinny_gemm.linear` of operands that have been checked."""
    cut = _plan_of(operands)
    name = _name(cut.rows, operands.storage, operands.out_type)
    addends = [0 if addend is None else addend for addend in (bias, residual)]
    _launch(name, cut, operands, (x, x.stride(0)), weight, (*addends, out), pdl=pdl)


def _plan_of(operands: LinearOperands) -> Plan:
    return plan(operands.m, operands.n, operands.k, num_multiprocessors())


def _launch(
    name: str,
    cut: Plan,
    operands: LinearOperands,
    x: tuple[object, ...],
    weight: Tensor,
    outputs: tuple[object, ...],
    *,
    pdl: bool,
) -> None:
    """Either kernel, with the arguments of its x, and with what is added, and out."""
    kernel("few_gemm", name)(
        cut.blocks,
        _THREADS,
        *x,
        box_map(weight, (cut.boxes, cut.rows), 128),
        *outputs,
        operands.m,
        operands.n,
        operands.k,
        cut.stages,
        cut.boxes,
        shared=cut.shared_bytes,
        pdl=pdl,
    )


def can_norm(m: int, n: int, k: int) -> bool:
    """Whether `norm_linear` supports such a product, on this device; then it is faster than a norm
    and a product."""
    return is_hopper() and m >= 1 and prefers(m, n, k)


def norm_linear(
    x: NormedRows | SummedRows,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor,
    pdl: bool = False,
) -> None:
    """norm @ weight.T + bias -> out, accumulated in float32, of the norm of rows, or of their sum
    with others, which is written on the way.

    Each block computes the norm for itself: that saves a launch. What is rounded to bfloat16 and
    multiplied is x * norm weight; the root of the mean of squares divides the products.

    Args:
        x: [m, k] bfloat16; see `can_norm`.
        weight: [n, k] bfloat16.
        bias: [n] bfloat16.
        out: [m, n] bfloat16.
        pdl: see `Kernel`. The first stages of the weights are read during the preceding kernel,
            which must not write them, nor the norm's weight.

    Raises:
        ValueError: wrong shape, type or alignment of an operand.
        RuntimeError: not a Hopper GPU.
    """
    operands = check_linear_operands(
        x.rows, weight, bias, None, out, gated=False, whole_vectors=False, max_tokens=MAX_TOKENS
    )
    m, n, k, *_ = operands
    sums = _check_norm(x, operands)
    if not is_hopper():
        raise RuntimeError("this kernel requires a Hopper GPU; see `can_norm`")
    if not can_norm(m, n, k):
        raise ValueError(f"[{m}, {k}] @ [{n}, {k}].T is not supported; see `can_norm`")
    cut = _plan_of(operands)
    rows = (x.rows, x.rows.stride(0), *sums, x.weight, x.eps)
    outputs = (0 if bias is None else bias, out)
    _launch(_norm_name(cut.rows), cut, operands, rows, weight, outputs, pdl=pdl)


def _check_norm(
    x: NormedRows | SummedRows, operands: LinearOperands
) -> tuple[Tensor | int, Tensor | int]:
    """Check what a norm needs besides rows; returns what is added to them, and where the sum is
    written, or null for both."""
    if not operands.storage == operands.out_type == _NORM_STORAGE:
        raise ValueError(f"x is {operands.storage} and out {operands.out_type}; allowed: bfloat16")
    shape = operands.m, operands.k
    check("the norm's weight", x.weight, shape[1:], torch.float32)
    if not isinstance(x, SummedRows):
        return 0, 0
    for name, rows in (("residual", x.residual), ("total", x.total)):
        check(name, rows, shape, torch.float32)
    return x.residual, x.total


_NORM_STORAGE = STORAGE_TYPES[torch.bfloat16]


def _name(rows: int, storage: str, out_type: str) -> str:
    return f"few_gemm<{storage}, {out_type}, {rows}>"


def _norm_name(rows: int) -> str:
    return f"norm_few_gemm<{_NORM_STORAGE}, {rows}>"


def instantiations() -> list[Instantiation]:
    """All kernels of this module."""
    types = [
        (storage, out_type) for storage in STORAGE_TYPES.values() for out_type in (storage, "float")
    ]
    names = [tuple(_name(rows, *both) for rows in ROWS) for both in types]
    names.append(tuple(map(_norm_name, ROWS)))
    return [("few_gemm", of_types, ()) for of_types in names]
