"""Preemptions under load with and without blocks that are kept free for growth, in simulated time.

A pool that is much too small for the batch, and more requests waiting than it can take.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from inflight.core.batch import Batch, StepOutput
from inflight.core.request import Request
from inflight.core.sequence import Sequence
from inflight.kv.layout import KVTables
from inflight.kv.settings import KVSettings
from inflight.sampling.params import SamplingParams
from inflight.scheduling.kv_forecast import KVForecast
from inflight.scheduling.scheduler import Scheduler
from inflight.scheduling.step_limits import StepLimits
from inflight.scheduling.waiting_queue import WaitingQueue

BLOCK_SIZE = 16
MAX_NUM_SEQS = 256
RESERVE = 0.08
"""The default of `kv_growth_reserve`."""


@dataclass
class Measured:
    """From when the lengths are known until the queue is empty.

    Attributes:
        preemptions: per request that ended.
        recomputed: tokens that were computed again, per token that was needed.
        tokens_per_s: output.
        running: sequences, on average.
    """

    preemptions: float
    recomputed: float
    tokens_per_s: float
    running: float


def seconds(batch: Batch) -> float:
    """Of a step, as those of an 8B model on an H200."""
    total = 4e-3
    for chunk in batch.chunks:
        total += 23e-6 * chunk.length
        if chunk.length == 1:
            total += 33e-9 * chunk.end  # 128 KiB of a token's keys and values at 4 TB/s
        else:
            total += 3e-10 * chunk.length * (chunk.start + chunk.length / 2)
    return total


def requests(count: int, prompts: np.ndarray, outputs: np.ndarray, cut: bool) -> list[Sequence]:
    """Their outputs end after so many tokens: at `max_tokens`, or far before it."""
    rng = np.random.default_rng(1)
    found = []
    for index in range(count):
        max_tokens = int(outputs[index]) if cut else 8192
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=cut)
        ids = rng.integers(0, 50_000, int(prompts[index])).tolist()
        found.append(Sequence(Request(index, ids, params), max_tokens))
    return found


def measure(
    waiting: list[Sequence], outputs: np.ndarray, num_blocks: int, reserve: float
) -> Measured:
    tables = KVTables.single(BLOCK_SIZE)
    forecast = KVForecast(tables, MAX_NUM_SEQS, int(reserve * num_blocks)) if reserve else None
    plan = Scheduler(
        KVSettings(num_blocks=num_blocks, block_size=BLOCK_SIZE, enable_prefix_caching=False),
        StepLimits(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=8192),
        waiting=WaitingQueue(max_waiting=len(waiting)),
        forecast=forecast,
    )
    for one in waiting:
        plan.add(one)
    # Steps, running, ended, preempted, computed, needed, output tokens, seconds.
    counts, begin = np.zeros(8), None
    while plan.waiting:
        batch = plan.schedule()
        sampled = [[1] if chunk.samples else [] for chunk in batch.chunks]
        output = StepOutput(sampled, [[-0.5] * len(one) for one in sampled], {})
        needed = ended = 0
        for each in plan.commit(batch, output):
            one = each.sequence
            if one.num_output_tokens == outputs[one.request_id]:
                plan.finish(one)
                ended += 1
                needed += one.num_tokens - 1
        num_sampled = sum(map(len, sampled))
        running = len(plan.running)
        counts += (1, running, ended, 0, batch.num_tokens, needed, num_sampled, seconds(batch))
        counts[3] = plan.num_preemptions
        if begin is None and counts[2] >= len(waiting) // 3:
            begin = counts.copy()
    assert begin is not None
    steps, running, ended, preempted, computed, needed, num_output, time = counts - begin
    return Measured(preempted / ended, computed / needed - 1.0, num_output / time, running / steps)


def drawn(mean: float, sigma: float, count: int, seed: int) -> np.ndarray:
    """Lognormal, in whole tokens."""
    found = np.random.default_rng(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return np.clip(found, 4, 4096).astype(int)


@pytest.mark.parametrize(
    ("mean", "sigma", "prompt", "num_blocks"),
    [(400, 1.0, 300, 4000), pytest.param(600, 0.7, 200, 6000, marks=pytest.mark.long)],
)
def test_preemptions_are_rare_at_the_same_throughput(
    mean: float, sigma: float, prompt: float, num_blocks: int
) -> None:
    count = 1600
    prompts, outputs = drawn(prompt, 0.8, count, 1), drawn(mean, sigma, count, 0)
    before, after = (
        measure(requests(count, prompts, outputs, False), outputs, num_blocks, reserve)
        for reserve in (0.0, RESERVE)
    )
    assert before.preemptions > 0.04
    assert after.preemptions < min(0.012, before.preemptions / 10)
    assert after.recomputed < before.recomputed
    assert after.tokens_per_s > 0.99 * before.tokens_per_s


@pytest.mark.parametrize("num_blocks", [1200, pytest.param(4000, marks=pytest.mark.long)])
def test_outputs_of_one_length_take_no_longer(num_blocks: int) -> None:
    count = num_blocks // 3
    prompts, outputs = np.full(count, 300), np.full(count, 512)
    before, after = (
        measure(requests(count, prompts, outputs, True), outputs, num_blocks, reserve)
        for reserve in (0.0, RESERVE)
    )
    assert after.preemptions <= before.preemptions
    assert after.tokens_per_s > 0.99 * before.tokens_per_s


@pytest.mark.parametrize(
    ("mean", "prompt"), [(400, 300), pytest.param(800, 60, marks=pytest.mark.long)]
)
def test_a_small_pool_is_still_used(mean: float, prompt: float) -> None:
    count, num_blocks = 800, 1200
    prompts, outputs = drawn(prompt, 0.8, count, 1), drawn(mean, 0.8, count, 0)
    before, after = (
        measure(requests(count, prompts, outputs, False), outputs, num_blocks, reserve)
        for reserve in (0.0, RESERVE)
    )
    assert after.preemptions < before.preemptions / 2
    assert after.tokens_per_s > 0.99 * before.tokens_per_s
