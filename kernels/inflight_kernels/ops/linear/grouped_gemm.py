"""Linear layers for some tokens whose weight has 4, 6 or 8 bits a value and scales of groups, on
Hopper GPUs; x has 16. Shapes: m tokens, k inputs, n rows of the weight.

Each sum is accumulated in a fixed order: results are bitwise reproducible.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from inflight_kernels.ops.linear.grouped_rows import (
    BOX_TILES,
    KINDS,
    RECORD_COLUMNS,
    RECORD_ROWS,
    GroupedKind,
    GroupedRows,
)
from inflight_kernels.ops.linear.operands import MAX_SHARED_BYTES, check_grouped_operands
from inflight_kernels.runtime.compile import Instantiation
from inflight_kernels.runtime.launch import is_hopper, kernel, num_multiprocessors
from inflight_kernels.runtime.tensor_map import matrix_map, record_map

# As in grouped_gemm_hopper.cu.
_GROUPS = 2
_ROWS = 64 * _GROUPS
_BOX_COLUMNS = 64
_TOKENS = (32, 64, 128)

# Of a block, if two of them are to fit on a multiprocessor.
_HALF_OF_SHARED = 113 * 1024
# Of the multiprocessors, so many need a block.
_MIN_BUSY = 0.75
_MIN_STAGES_OF_BLOCK = 4
# What it costs that blocks start when others have ended, in stages.
_NEXT_TURN = 10


@dataclass(frozen=True, slots=True)
class Tile:
    """What a cluster of blocks computes.

    Attributes:
        tokens: of x, padding included.
        split: blocks of the cluster, which share the columns.
        teams: of warpgroups in a block, which take turns with its stages.
    """

    tokens: int
    split: int
    teams: int = 1

    @property
    def threads(self) -> int:
        """Of a block."""
        return 128 * _GROUPS * self.teams + 32

    @property
    def pairs(self) -> bool:
        """Whether two blocks fit on a multiprocessor."""
        return self.tokens <= 64 and self.teams == 1

    def stages(self, kind: GroupedKind) -> int:
        """Pipeline stages in shared memory: as many as fit."""
        limit = _HALF_OF_SHARED if self.pairs else MAX_SHARED_BYTES
        return (limit - 1024) // (self._stage_bytes(kind) + 16)

    def shared_bytes(self, kind: GroupedKind) -> int:
        """Dynamic shared memory of a block."""
        stages = self.stages(kind)
        sums = self.teams * self.tokens * (_ROWS + 4) * 4
        return 1024 + max(stages * self._stage_bytes(kind), sums) + 16 * (stages + 1)

    def _stage_bytes(self, kind: GroupedKind) -> int:
        records = _ROWS // RECORD_ROWS * kind.record_bytes
        return -(-(self.tokens * 2 * RECORD_COLUMNS + records) // 1024) * 1024


TILES = (
    *(Tile(tokens, split) for tokens in _TOKENS[:-1] for split in (1, 2, 4)),
    *(Tile(tokens, 3, teams=2) for tokens in _TOKENS[:-1]),
    *(Tile(_TOKENS[-1], split) for split in (1, 2, 3)),
)
"""All that kernels are compiled for."""


@functools.lru_cache(maxsize=4096)
def plan(m: int, n: int, k: int, num_multiprocessors: int) -> Tile:
    """The tile with which most multiprocessors have a block, and the busiest ones little more.

    Measured on an H200 and an H100 (benchmarks/notes.md). Clusters of four blocks, each alone on a
    multiprocessor, do not all run at once: they lie within a GPC.

    Args:
        m: tokens.
        n, k: of the weight.
        num_multiprocessors: of the device.
    """
    tokens = next((count for count in _TOKENS if m <= count), _TOKENS[-1])
    tiles = -(-m // tokens) * -(-n // _ROWS)
    stages = -(-k // RECORD_COLUMNS)
    splits = [one for one in (1, 2, 3, 4) if one == 1 or stages >= one * _MIN_STAGES_OF_BLOCK]
    if tokens > 64:

        def cost(split: int) -> int:
            at_once = max(1, num_multiprocessors // split - (2 if split > 2 else 0))
            turns = -(-tiles // at_once)
            return turns * -(-stages // split) + (turns - 1) * _NEXT_TURN

        return Tile(tokens, min(splits[:3], key=cost))
    if 3 in splits and tiles * 4 <= num_multiprocessors:
        return Tile(tokens, 3, teams=2)
    pairs = [split for split in splits if split != 3]
    enough = (split for split in pairs if tiles * split >= _MIN_BUSY * num_multiprocessors)
    return Tile(tokens, next(enough, pairs[-1]))


def linear(
    x: Tensor,
    weight: GroupedRows,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    out: Tensor,
    gated: bool = False,
    pdl: bool = False,
) -> None:
    """x @ weight.T + bias, gated or not, + residual -> out, accumulated in float32.

    Args:
        x: [m, k] bfloat16; the stride of rows is a multiple of 8.
        weight, bias, residual, out, gated, pdl: as in `grouped.linear`.

    Raises:
        ValueError: wrong shape, type or alignment of an operand.
        RuntimeError: not a Hopper GPU.
    """
    m, n, k = check_grouped_operands(x, weight, bias, residual, out, gated=gated)
    if not m or not n:
        return
    if not is_hopper():
        raise RuntimeError("this kernel requires a Hopper GPU; see `grouped.linear`")
    tile = plan(m, n, k, num_multiprocessors())
    token_tiles = -(-m // tile.tokens)
    columns, width = (_ROWS // 2, n // 2) if gated else (_ROWS, n)
    kernel("grouped_gemm_hopper", _name(weight.kind, tile))(
        token_tiles * -(-width // columns) * tile.split,
        tile.threads,
        matrix_map(x, (tile.tokens, _BOX_COLUMNS), 128),
        record_map(weight.records, BOX_TILES),
        0 if weight.table is None else weight.table,
        0 if bias is None else bias,
        0 if residual is None else residual,
        out,
        m,
        n,
        k,
        token_tiles,
        gated,
        out.dtype == torch.float32,
        shared=tile.shared_bytes(weight.kind),
        pdl=pdl,
    )


def _name(kind: GroupedKind, tile: Tile) -> str:
    return (
        f"grouped_product<{kind.name}, {tile.tokens}, {_GROUPS}, {tile.teams}, "
        f"{tile.stages(kind)}, {tile.split}>"
    )


def instantiations() -> list[Instantiation]:
    """All kernels of this module."""
    return [
        ("grouped_gemm_hopper", tuple(_name(kind, tile) for tile in TILES), ()) for kind in KINDS
    ]
