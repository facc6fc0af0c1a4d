"""Prompt tokens of a step under a target ITL, against machines whose step times are known."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import tiny
from inflight.core.batch import Batch, Chunk
from inflight.scheduling.prefill_budget import FEWEST_TOKENS, GENTLE, PrefillBudget, StepTimes


@dataclass(frozen=True)
class Machine:
    """Seconds of a step, of which some are noise."""

    base: float
    decode: float
    token: float
    pair: float
    noise: float = 0.0

    def seconds(self, decodes: int, tokens: int, start: int, luck: random.Random) -> float:
        exact = self.base + self.decode * decodes + self.token * tokens
        exact += self.pair * tokens * (start + tokens / 2)
        return exact * (1.0 + self.noise * luck.uniform(-1.0, 1.0))


# An 8B model on an H200, and SmolLM2 on two cores of a CPU.
H200 = Machine(4e-3, 20e-6, 23e-6, 3e-10, noise=0.05)
LAPTOP = Machine(10e-3, 3e-3, 1.2e-3, 2e-7, noise=0.1)


def _prefill(
    machine: Machine, target: float, num_decodes: int, prompt_tokens: int
) -> tuple[list[int], list[float]]:
    """Chunks of a prompt beside decodes, and the times of their steps."""
    luck = random.Random(7)
    budget = PrefillBudget(target)
    decodes = [tiny.make_sequence([5] * 100, [1]) for _ in range(num_decodes)]
    prompt = tiny.make_sequence([5] * prompt_tokens, [])
    chunks, times = [], []
    for _ in range(20):
        seconds = machine.seconds(num_decodes, 0, 0, luck)
        budget.observe(Batch([Chunk(one, 100, 1, True) for one in decodes]), seconds)
    while prompt.num_computed < prompt_tokens:
        start = prompt.num_computed
        length = min(budget.tokens(num_decodes, [prompt]), prompt_tokens - start)
        rows = [Chunk(one, 100, 1, True) for one in decodes]
        seconds = machine.seconds(num_decodes, length, start, luck)
        budget.observe(Batch([*rows, Chunk(prompt, start, length, False)]), seconds)
        prompt.num_computed += length
        chunks.append(length)
        times.append(seconds)
    return chunks, times


@pytest.mark.parametrize(
    ("machine", "target"), [(H200, 0.030), (H200, 0.010), (LAPTOP, 0.400)], ids=str
)
def test_steps_with_a_long_prompt_stay_within_the_target(machine: Machine, target: float) -> None:
    num_decodes = 64 if machine is H200 else 8
    chunks, times = _prefill(machine, target, num_decodes, 30_000 if machine is H200 else 8_000)
    times.sort()
    assert times[-1] < 1.25 * target
    assert times[int(0.95 * len(times))] < 1.1 * target
    # Nor do they waste it.
    assert sum(times) / len(times) > 0.8 * target
    assert chunks[3] > chunks[-2]  # a longer context, smaller chunks


def _learned(ttft_target: float) -> PrefillBudget:
    """The budget of an exact H200, for an ITL of 30 ms."""
    budget, luck = PrefillBudget(0.030, ttft_target), random.Random(3)
    machine = Machine(H200.base, H200.decode, H200.token, H200.pair)
    prompt = tiny.make_sequence([5] * 60_000, [])
    row = Chunk(tiny.make_sequence([5] * 100, [1]), 100, 1, True)
    for decodes in range(1, 64):
        budget.observe(Batch([row] * decodes), machine.seconds(decodes, 0, 0, luck))
    for _ in range(60):
        decodes, length = luck.randrange(1, 64), luck.randrange(1, 900)
        start = luck.randrange(45_000)
        batch = Batch([row] * decodes + [Chunk(prompt, start, length, False)])
        budget.observe(batch, machine.seconds(decodes, length, start, luck))
    return budget


def _bounded_by_memory(decodes: int, tokens: int, start: int, luck: random.Random) -> float:
    """Seconds of a step of an 8B model on an H200, as measured: products of few tokens take as long
    as those of none, and attention works on tiles of 32 tokens."""
    exact = max(4.3e-3, (decodes + tokens) * 19e-6 + 0.6e-3) + decodes * 24e-6 + 0.4e-3
    if tokens:
        exact += 1.6e-3 * (decodes > 0) + 1.1e-9 * (-(-tokens // 32) * 32) * (start + tokens / 2)
    return exact * (1.0 + 0.03 * luck.uniform(-1.0, 1.0))


class _Launched:
    """Steps of which two are launched before the times of the first are known."""

    def __init__(self, budget: PrefillBudget) -> None:
        self._budget = budget
        self._steps: list[tuple[Batch, float]] = []

    def add(self, batch: Batch, seconds: float) -> None:
        self._steps.append((batch, seconds))
        if len(self._steps) > 2:
            self._budget.observe(*self._steps.pop(0))


def _prompt_beside_streams(
    budget: PrefillBudget, num_streams: int, luck: random.Random
) -> list[float]:
    """Times of the steps that compute a long prompt beside streams, whose prompts come first."""
    row = Chunk(tiny.make_sequence([5] * 100, [1]), 100, 1, True)
    short = tiny.make_sequence([5] * 512, [])
    launched = _Launched(budget)
    left, decodes, now = num_streams, 0, 0.0
    while left:
        room = 16 if not decodes else budget.tokens(decodes, [short], left, 512 * left, now) // 512
        started = min(left, max(1, room))
        seconds = _bounded_by_memory(decodes, 512 * started, 0, luck)
        launched.add(Batch([row] * decodes + [Chunk(short, 0, 512, True)] * started), seconds)
        left, decodes, now = left - started, decodes + started, now + seconds
    for _ in range(200):
        seconds = _bounded_by_memory(num_streams, 0, 0, luck)
        launched.add(Batch([row] * num_streams), seconds)
    prompt = tiny.make_sequence([5] * 30_000, [])
    times: list[float] = []
    while prompt.num_computed < 30_000:
        start = prompt.num_computed
        length = budget.tokens(num_streams, [prompt], now=sum(times))
        length = min(length, 30_000 - start)
        times.append(_bounded_by_memory(num_streams, length, start, luck))
        launched.add(Batch([*[row] * num_streams, Chunk(prompt, start, length, False)]), times[-1])
        prompt.num_computed += length
    return times


@pytest.mark.parametrize("seed", range(3))
def test_each_of_many_long_prompts_raises_the_itl_little(seed: int) -> None:
    budget, luck = PrefillBudget(0.030, 5.0), random.Random(seed)
    for num_streams in (64, 64, 3, 64, 20, 64):
        alone = _bounded_by_memory(num_streams, 0, 0, random.Random(seed))
        times = sorted(_prompt_beside_streams(budget, num_streams, luck))
        assert times[int(0.99 * len(times))] - alone < 5e-3
        assert sum(times) < 5.0


@pytest.mark.parametrize("seed", range(3))
def test_each_of_many_long_prompts_keeps_the_target(seed: int) -> None:
    budget, luck = PrefillBudget(0.010), random.Random(seed)
    for num_streams in (64, 64, 3, 64, 20, 64):
        times = sorted(_prompt_beside_streams(budget, num_streams, luck))
        assert times[int(0.99 * len(times))] < 1.15 * 0.010
        assert times[len(times) // 2] > 0.85 * 0.010


def test_prompts_in_time_add_half_to_a_step() -> None:
    prompt = tiny.make_sequence([5] * 3000, [])
    alone = H200.base + 64 * H200.decode
    length = _learned(100.0).tokens(64, [prompt])
    added = H200.token * length + H200.pair * length * length / 2
    assert 0.9 * GENTLE * alone - H200.token * FEWEST_TOKENS < added < 1.05 * GENTLE * alone


def test_prompts_get_more_the_longer_they_have_waited() -> None:
    prompt = tiny.make_sequence([5] * 3000, [])
    budget = _learned(2.0)
    found = [budget.tokens(64, [prompt], now=now) for now in (0.0, 1.0, 1.6, 1.68, 1.75, 5.0)]
    assert found == sorted(found) and found[0] < found[3] < found[-1]
    assert found[-1] == _learned(1e-3).tokens(64, [prompt])  # what the ITL target allows


def test_the_queue_and_all_prompts_count() -> None:
    budget = _learned(2.0)
    prompts = [tiny.make_sequence([5] * 6000, []) for _ in range(8)]
    one, few = budget.tokens(64, prompts[:1]), budget.tokens(64, prompts[:6])
    assert one < few < budget.tokens(64, prompts)
    assert one < budget.tokens(64, prompts[:1], num_waiting=4, num_waiting_tokens=30_000)
    prompts[0].queued_at = 1.0  # arrived when others had waited for a second
    assert budget.tokens(64, prompts[:6], now=1.0) > few


def test_decodes_that_exceed_the_target_alone_do_not_stop_prompts() -> None:
    chunks, _ = _prefill(LAPTOP, 0.005, 4, 2_000)
    assert set(chunks[2:-1]) == {FEWEST_TOKENS}


def test_chunks_grow_step_by_step_while_nothing_is_known() -> None:
    chunks, _ = _prefill(Machine(1e-6, 0.0, 0.0, 0.0), 1.0, 2, 30_000)
    assert chunks[0] <= 256
    assert all(after <= 2 * before for before, after in itertools.pairwise(chunks))
    assert len(chunks) < 12


def test_what_prompts_cost_is_known_after_many_decodes() -> None:
    budget, luck = _learned(100.0), random.Random(5)
    prompt = tiny.make_sequence([5] * 3000, [])
    before = budget.tokens(64, [prompt])
    row = Chunk(tiny.make_sequence([5] * 100, [1]), 100, 1, True)
    for _ in range(3000):
        budget.observe(Batch([row] * 64), H200.seconds(64, 0, 0, luck))
    assert budget.tokens(64, [prompt]) == pytest.approx(before, rel=0.25)


def test_one_slow_step_is_forgotten() -> None:
    budget, prompt = PrefillBudget(0.030), tiny.make_sequence([5] * 9000, [])
    luck = random.Random(1)

    def step(length: int, seconds: float) -> None:
        row = Chunk(tiny.make_sequence([5] * 100, [1]), 100, 1, True)
        budget.observe(Batch([row, Chunk(prompt, 0, length, False)]), seconds)

    for length in (256, 512, 700, 900, 1000, 1100, 800, 600, 500, 1050, 950, 256, 300):
        step(length, H200.seconds(1, length, 0, luck))
    before = budget.tokens(1, [prompt])
    step(900, 5.0)  # a kernel was compiled
    for _ in range(40):
        step(900, H200.seconds(1, 900, 0, luck))
    assert budget.tokens(1, [prompt]) > 0.7 * before


@example([(0, 76, 0, 9.6e-284), (0, 38, 57, 1.0)])  # whose coefficients have squares of 0
@given(
    st.lists(
        st.tuples(
            st.integers(0, 256), st.integers(0, 8192), st.integers(0, 100_000), st.floats(0, 10)
        ),
        max_size=40,
    )
)
def test_any_times_leave_a_valid_budget(steps: list[tuple[int, int, int, float]]) -> None:
    budgets, times = (PrefillBudget(0.030), PrefillBudget(0.030, 2.0)), StepTimes(2)
    prompt = tiny.make_sequence([5] * 10, [])
    for decodes, tokens, start, seconds in steps:
        rows = [Chunk(prompt, 9, 1, True)] * decodes
        if tokens:
            rows.append(Chunk(prompt, start, tokens, False))
        for budget in budgets if rows else ():
            budget.observe(Batch(rows), seconds)
        size = (
            1.0,
            decodes,
            float(bool(decodes and tokens)),
            tokens,
            tokens * (start + tokens / 2),
        )
        times.observe(int(tokens > 0), size, seconds)
        most, found = (budget.tokens(decodes, [prompt], 3, 500, 1.0) for budget in budgets)
        assert most >= found >= FEWEST_TOKENS and found % FEWEST_TOKENS == 0
        assert min(times.coefficients()) >= 0.0
