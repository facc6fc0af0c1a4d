"""Linear layers for up to 8 tokens, in 16 bits. Shapes: m tokens, k inputs, n rows of the weight.

Used by `skinny_gemm.linear`, where it is faster; see few_gemm.cu. Requires a Hopper GPU. The tiling
and the order of summation are fixed by `plan`: results are bitwise reproducible.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from torch import Tensor

from inflight_kernels.ops.linear.operands import (
    MAX_SHARED_BYTES,
    STAGE_DEPTH_BYTES,
    STORAGE_TYPES,
    LinearOperands,
)
from inflight_kernels.runtime.compile import Instantiation
from inflight_kernels.runtime.launch import kernel, num_multiprocessors
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
"""Of weights, at most, if a box has not more: a consumer starts when all of them are there."""

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
    """The smallest tile with which each block has one, and a ring of all of its stages, or of as
    many as leave room.

    Args:
        m, n, k: of a product that the kernel supports.
        num_multiprocessors: of the device.
    """
    rows = next(rows for rows in ROWS if n <= rows * num_multiprocessors)
    return plan_of(rows, m, n, k, -(-n // rows))


def plan_of(rows: int, m: int, n: int, k: int, blocks: int) -> Plan:
    """The plan with such tiles and so many blocks; see `plan`."""
    box_bytes, all_boxes = rows * STAGE_DEPTH_BYTES, k * 2 // STAGE_DEPTH_BYTES
    boxes = max(1, min(_STAGE_BYTES // box_bytes, all_boxes // _CONSUMERS))
    of_consumers = _CONSUMERS * (boxes * box_bytes + 16)
    other_bytes = m * (k + 8) * 2 + _CONSUMERS * MAX_TOKENS * rows * 4
    rounds = -(-all_boxes // (boxes * _CONSUMERS)) * -(-n // (rows * blocks))
    if other_bytes + rounds * of_consumers > MAX_SHARED_BYTES:
        rounds = max(1, (_SHARED_BYTES - other_bytes) // of_consumers)
    shared_bytes = max(other_bytes + rounds * of_consumers, _LEAST_SHARED_BYTES)
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
    m, n, k, storage, out_type, *_ = operands
    cut = plan(m, n, k, num_multiprocessors())
    kernel("few_gemm", _name(cut.rows, storage, out_type))(
        cut.blocks,
        _THREADS,
        x,
        x.stride(0),
        box_map(weight, (cut.boxes, cut.rows), 128),
        0 if bias is None else bias,
        0 if residual is None else residual,
        out,
        m,
        n,
        k,
        cut.stages,
        cut.boxes,
        shared=cut.shared_bytes,
        pdl=pdl,
    )


def _name(rows: int, storage: str, out_type: str) -> str:
    return f"few_gemm<{storage}, {out_type}, {rows}>"


def instantiations() -> list[Instantiation]:
    """All kernels of this module."""
    types = [
        (storage, out_type) for storage in STORAGE_TYPES.values() for out_type in (storage, "float")
    ]
    return [("few_gemm", tuple(_name(rows, *names) for rows in ROWS), ()) for names in types]
