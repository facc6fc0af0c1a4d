"""Selects the kernels of latent attention for the chunks of a step: a pure function of what the
host knows about the step. The memory of their plans is laid out as in `ops.attention.dispatch`.

The heads of a token are rows of one unit, as all share a key. With few rows the kernel is bound by
reading the cache; with more, it reads each tile of keys once for several tokens.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from inflight_kernels.ops.attention.dispatch import (
    NO_LIMIT,
    Gpu,
    Part,
    Room,
    fits,
    lay_out,
    num_blocks,
)
from inflight_kernels.ops.latent.operands import KEY, RANK

# As in latent_shape.cuh.
_KEYS = 32
_WARPS = 8
_DEPTHS = 4
_SPLIT_BYTES = 128
# With up to so many rows, queries are in registers.
_REGISTER_ROWS = 32


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Tile shape of a block; the fields are documented in latent_shape.cuh."""

    rows: int
    stages: int
    paired: bool = False

    stem = "latent_attention"
    heads = 1
    keys = _KEYS
    threads = 32 * _WARPS
    max_blocks = 1  # per multiprocessor: a second one would leave fewer stages to each

    @property
    def shared_bytes(self) -> int:
        row = (KEY + 8) * 2
        queries = 0 if self.rows <= _REGISTER_ROWS else self.rows * row
        scores = _DEPTHS * self.rows * _KEYS * 4
        weights = self.rows * (_KEYS + 8) * 2
        factors = self.rows * 8
        exchange = self.rows * (RANK // 2 * 4 + 2 * 8) if self.paired else 0
        others = queries + scores + weights + factors + _SPLIT_BYTES + exchange
        return self.stages * _KEYS * row + others

    def name(self, storage: str) -> str:
        """The kernel's name expression."""
        shape = f"{storage}, {self.rows}, {self.stages}"
        if self.paired:
            return f"attend_latents_in_pairs<attention::LatentShape<{shape}, true>>"
        return f"attend_latents<attention::LatentShape<{shape}>>"


CANDIDATES = (
    (LatentShape(16, 4, paired=True), LatentShape(16, 4), LatentShape(16, 2)),
    (LatentShape(32, 4), LatentShape(32, 3), LatentShape(32, 2)),
    (LatentShape(64, 3),),
)
"""Shapes by rows, the preferred ones first. The last one of 16 and of 32 rows fits in 100 KiB, the
shared memory per multiprocessor of compute capability 8.6, 8.9 and 12.x."""


@functools.cache
def shapes(gpu: Gpu) -> tuple[LatentShape, ...]:
    """Shapes by ascending rows: the first one of the candidates that a GPU supports."""
    found = []
    for candidates in CANDIDATES:
        supported = [shape for shape in candidates if gpu.has_pairs or not shape.paired]
        found += [shape for shape in supported if fits(shape, gpu.shared_bytes)][:1]
    return tuple(found)


def _with_rows(rows: int, gpu: Gpu) -> LatentShape:
    """The first shape with so many rows, or the one with most."""
    found = shapes(gpu)
    return next((shape for shape in found if shape.rows >= rows), found[-1])


@functools.lru_cache(maxsize=4096)
def parts(
    num_chunks: int,
    num_tokens: int,
    max_q_len: int,
    num_heads: int,
    gpu: Gpu,
    batch_invariant: bool = False,
) -> tuple[Part, ...]:
    """The launches of a step.

    Args:
        num_chunks: n.
        num_tokens: T.
        max_q_len: maximum tokens of a chunk.
        num_heads: H.
        gpu: the device.
        batch_invariant: see `AttentionParams`.
    """
    found: list[Part] = []
    chosen = _choose_shapes(num_chunks, max_q_len * num_heads, num_heads, gpu, batch_invariant)
    for shape, min_rows, max_rows in chosen:
        num_shares = num_blocks(shape, gpu)
        num_items = num_chunks + num_tokens * num_heads // shape.rows
        room = Room(num_shares, num_chunks, num_items, 2 * num_shares * shape.rows, RANK)
        begin = found[-1].end if found else 0
        found.append(lay_out(shape, (min_rows, max_rows), num_shares, room, begin))
    return tuple(found)


def _choose_shapes(
    num_chunks: int, rows: int, num_heads: int, gpu: Gpu, batch_invariant: bool
) -> list[tuple[LatentShape, int, int]]:
    """Shapes of a step's launches, each with min_rows and max_rows (see `Part`).

    Args:
        rows: maximum rows of a chunk.
        num_chunks, num_heads, gpu, batch_invariant: see `parts`.
    """
    few, many = _with_rows(num_heads, gpu), shapes(gpu)[-1]
    if batch_invariant:  # one kernel for all: a compromise of prompts and decodes
        return [(_with_rows(max(num_heads, _REGISTER_ROWS), gpu), 0, NO_LIMIT)]
    if rows <= many.rows or num_chunks == 1:
        return [(_with_rows(rows, gpu), 0, NO_LIMIT)]
    if few == many:
        return [(many, 0, NO_LIMIT)]
    return [(few, 0, few.rows), (many, few.rows, NO_LIMIT)]


def max_workspace_bytes(
    num_chunks: int,
    num_tokens: int,
    max_q_len: int | None,
    num_heads: int,
    gpu: Gpu,
    batch_invariant: bool = False,
) -> int:
    """Workspace bytes that suffice for any step with at most so many chunks and tokens, and a
    max_q_len up to this one, or any if None: the maximum over the largest step of each shape."""
    if max_q_len is None:
        max_q_len = NO_LIMIT
    lengths = {min(max_q_len, max(1, shape.rows // num_heads)) for shape in shapes(gpu)}
    return max(
        parts(
            num_chunks,
            min(num_tokens, num_chunks * q_len),
            q_len,
            num_heads,
            gpu,
            batch_invariant,
        )[-1].end
        for q_len in (*lengths, max_q_len)
    )
