"""Times the steps of a GPU when its runner starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from inflight.core.step_size import StepSize
from inflight.execution.batch.device_batch import DeviceBatch
from inflight.execution.drafters.drafter import DeviceDrafter
from inflight.execution.graphs.buckets import row_counts, verification_sizes
from inflight.scheduling.draft_budget import StepCosts, StepTimes

# Runs of each call.
_TIMINGS = 3

# Tokens of each sequence before the step: attention has keys to read, but few.
_CONTEXT = 512

# Steps without drafts are timed for up to so many sequences: beyond, attention is as fast as in
# steps with drafts.
_MAX_PLAIN = 64


class TimedLimits(NamedTuple):
    """Limits of the steps that are timed, as of `BatchLimits`.

    Attributes:
        max_num_seqs, max_rows, max_drafts: of a step.
        max_len: of a sequence.
    """

    max_num_seqs: int
    max_rows: int
    max_drafts: int
    max_len: int


def device_seconds(call: Callable[[], None]) -> float:
    """Device time of a call on the current stream, the minimum of a few runs."""
    times = []
    for _ in range(_TIMINGS):
        started = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        started.record()
        call()
        ended.record()
        ended.synchronize()
        times.append(float(started.elapsed_time(ended)) * 1e-3)
    return min(times)


def measure_costs(
    batch: DeviceBatch,
    drafter: DeviceDrafter,
    run: Callable[[StepSize], None],
    limits: TimedLimits,
) -> StepCosts:
    """Time steps with and without drafts, and drafting, on dummy sequences.

    Args:
        batch: without sequences.
        drafter: of the runner.
        run: launches a step of this size, up to its logits, and the drafter's update.
        limits: of the steps.
    """

    def seconds(size: StepSize, has_drafts: bool) -> float:
        # As few sequences as may have so many tokens.
        count = min(-(-size.num_tokens // size.max_q_len), limits.max_num_seqs)
        length = min(size.num_tokens // count, size.max_q_len, limits.max_len)
        start = min(_CONTEXT, limits.max_len - length)
        batch.send_dummies(count, length, start, has_drafts=has_drafts)
        return device_seconds(lambda: run(size))

    def times(sizes: Sequence[StepSize], has_drafts: bool = True) -> StepTimes:
        """Of captured sizes: a step takes as long as the next larger one of them."""
        tokens: list[int] = []
        found: list[float] = []
        for size in sizes:
            first = tokens[-1] + 1 if tokens else 1
            tokens += [first, size.num_tokens] if first < size.num_tokens else [first]
            found += [seconds(size, has_drafts)] * (len(tokens) - len(found))
        return StepTimes(tuple(tokens), tuple(found))

    sizes = verification_sizes(limits.max_rows, limits.max_drafts)
    of_one = [size for size in sizes if size.num_chunks == 1]
    of_several = [size for size in sizes if size.num_chunks > 1]
    plain = [StepSize(n, n, n, 1) for n in row_counts(min(limits.max_num_seqs, _MAX_PLAIN))]
    without = times(plain)
    several = times(of_several) if of_several else without  # no room for drafts
    one = times(of_one) if of_one else None
    trimmed = times(of_one, has_drafts=False) if of_one else None
    batch.clear()

    def draft(count: int) -> Callable[[], None]:
        return lambda: drafter.draft(batch, 1, count)

    most = limits.max_drafts
    drafting = device_seconds(draft(most))
    if most > 1:  # a search takes as long for one as for several
        drafting = max(0.0, drafting - device_seconds(draft(1))) / (most - 1)
    return StepCosts(several, drafting, one, without, trimmed)
