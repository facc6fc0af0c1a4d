"""Plans of attention: which blocks of a launch compute which rows with which keys.

A plan is made on the device from the lengths of a step's chunks, into the step's workspace, and is
the same for all layers with one `AttentionParams`.
"""

from __future__ import annotations

from typing import NamedTuple

from inflight_kernels.ops.attention.dispatch import (
    PREFIX_KEYS,
    HopperShape,
    Part,
    PlannedShape,
    Shape,
)
from inflight_kernels.ops.attention.operands import (
    AttentionMetadata,
    Cascade,
    DequantizedKV,
    PlannedStep,
    longest_of,
)
from inflight_kernels.runtime.launch import Int64, kernel

NO_WINDOW = 1 << 30
"""For kernels, the size of a window that holds all keys."""

_PLAN_THREADS = 1024
# The kernels for a step of one chunk, the items that they take at most, and the fewest shares for
# each unit.
_PLAN_SINGLE_THREADS = 256
_SINGLE_ITEMS = (1, 4)
_SINGLE_SHARES = 16


def plan(metadata: AttentionMetadata, *, history_ready: bool = False, pdl: bool = False) -> None:
    """Plan a step; its workspace then holds the plan for all layers with this spec.

    Args:
        metadata: of the step.
        history_ready: between what wrote the step's lengths and this plan, another plan with
            another workspace is on the stream; both may run at the same time.
        pdl: see `Kernel`.
    """
    spec = metadata.spec
    for part in metadata.parts:
        places = spec.num_kv_heads // part.shape.heads
        cascade = metadata.cascade_of(part)
        if cascade is not None:
            _plan_cascade(metadata, part, places, cascade, pdl)
            continue
        how = PlanLaunch(spec.batch_invariant, history_ready, pdl)
        plan_part(metadata, part, (spec.group, places), spec.window, how)
        if isinstance(part.shape, HopperShape) and metadata.dequantized is not None:
            _plan_dequantization(metadata, metadata.dequantized, part, pdl)


class PlanLaunch(NamedTuple):
    """How a part is planned: see `AttentionParams` and `plan`."""

    batch_invariant: bool
    history_ready: bool
    pdl: bool


def plan_part(
    step: PlannedStep, part: Part, heads: tuple[int, int], window: int, how: PlanLaunch
) -> None:
    """Plan a part of a step, of this or of another kind of attention.

    Args:
        step: the step.
        part: of it.
        heads: query heads that share a unit, and units of the same rows.
        window: see `AttentionParams`.
        how: it is planned.
    """
    max_items = _max_items(step, part, heads, how.batch_invariant)
    if max_items:
        query_start, seq_lens, _, *others, _ = _plan_arguments(step, part, heads, window)
        kernel("attention_plan", f"plan_single<{max_items}>")(
            1,
            _PLAN_SINGLE_THREADS,
            query_start,
            seq_lens,
            *others,
            how.history_ready,
            pdl=how.pdl,
        )
        return
    kernel("attention_plan", "plan")(
        1,
        _PLAN_THREADS,
        *_plan_arguments(step, part, heads, window),
        how.batch_invariant,
        how.history_ready,
        pdl=how.pdl,
    )


def _max_items(step: PlannedStep, part: Part, heads: tuple[int, int], batch_invariant: bool) -> int:
    """Items of the kernel for a part of one chunk, if it has few and they are always cut into
    pieces; 0 if it has not."""
    group, units = heads
    num_items = -(-longest_of(step) * group // part.shape.rows)
    is_single = (
        len(step.seq_lens) == 1
        and not batch_invariant
        and not isinstance(part.shape, HopperShape)
        and num_items * units * _SINGLE_SHARES <= part.num_shares
    )
    return next((most for most in _SINGLE_ITEMS if is_single and num_items <= most), 0)


def _cut_tiles(shape: PlannedShape) -> int:
    """What a cut costs if blocks have few tiles: so many more of them could one block process in
    the same time. Measured on an H200 (benchmarks/notes.md)."""
    if not isinstance(shape, Shape):
        return 4
    return 2 if shape.cached else 3


def _plan_arguments(
    step: PlannedStep, part: Part, heads: tuple[int, int], window: int
) -> tuple[object, ...]:
    """Arguments of a plan from `query_start` to `queue`."""
    base = step.workspace.data_ptr()
    return (
        step.query_start,
        step.seq_lens,
        len(step.seq_lens),
        *heads,
        part.shape.rows,
        part.shape.keys,
        window or NO_WINDOW,
        part.min_rows,
        part.max_rows,
        part.num_shares,
        _cut_tiles(part.shape),
        Int64(base + part.first_item),
        Int64(base + part.items),
        Int64(base + part.shares),
        Int64(base + part.arrivals),
        Int64(base + part.queue if isinstance(part.shape, HopperShape) else 0),
    )


def kernel_names() -> list[str]:
    """All kernels of this module."""
    singles = (f"plan_single<{most}>" for most in _SINGLE_ITEMS)
    return ["plan", *singles, "plan_cascade", "plan_dequantization"]


def _plan_cascade(
    metadata: AttentionMetadata, part: Part, places: int, cascade: Cascade, pdl: bool
) -> None:
    """Plan a part of a step whose chunks may share prefixes."""
    spec, tables = metadata.spec, metadata.block_tables
    kernel("attention_plan", "plan_cascade")(
        1,
        _PLAN_THREADS,
        *_plan_arguments(metadata, part, (spec.group, places), spec.window),
        part.shape.heads,
        tables,
        tables.shape[1],
        cascade.block_size.bit_length() - 1,
        cascade.min_keys // PREFIX_KEYS,
        max(1, -(-cascade.min_saved // PREFIX_KEYS)),
        cascade.max_pieces,
        cascade.prefixes,
        cascade.members,
        cascade.tokens,
        cascade.arrived,
        pdl=pdl,
    )


def _plan_dequantization(
    metadata: AttentionMetadata, memory: DequantizedKV, part: Part, pdl: bool
) -> None:
    spec, num_blocks = metadata.spec, memory.blocks.shape[1]
    kernel("attention_plan", "plan_dequantization")(
        1,
        _PLAN_THREADS,
        metadata.query_start,
        metadata.seq_lens,
        len(metadata.seq_lens),
        spec.group,
        part.shape.keys,
        spec.window or NO_WINDOW,
        part.min_rows,
        num_blocks,
        memory.tables,
        num_blocks,
        memory.sources,
        memory.sources[num_blocks],
        pdl=pdl,
    )
