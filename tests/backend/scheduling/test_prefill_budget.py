"""Prompt tokens of a step under a target ITL, against machines whose step times are known."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest
from hypothesis import given
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
    for _ in range(60):
        decodes, length = luck.randrange(1, 64), luck.randrange(1, 900)
        start = luck.randrange(45_000)
        batch = Batch([row] * decodes + [Chunk(prompt, start, length, False)])
        budget.observe(batch, machine.seconds(decodes, length, start, luck))
    return budget


def test_prompts_in_time_add_three_quarters_to_a_step() -> None:
    prompt = tiny.make_sequence([5] * 3000, [])
    alone = H200.base + 64 * H200.decode
    length = _learned(100.0).tokens(64, [prompt])
    added = H200.token * length + H200.pair * length * length / 2
    assert 0.9 * GENTLE * alone - H200.token * FEWEST_TOKENS < added < 1.05 * GENTLE * alone


def test_prompts_get_more_the_longer_they_have_waited() -> None:
    prompt = tiny.make_sequence([5] * 3000, [])
    budget = _learned(2.0)
    found = [budget.tokens(64, [prompt], now=now) for now in (0.0, 1.0, 1.8, 1.87, 1.9, 5.0)]
    assert found == sorted(found) and found[0] < found[3] < found[-1]
    assert found[-1] == _learned(1e-3).tokens(64, [prompt])  # what the ITL target allows


def test_the_queue_and_all_prompts_count() -> None:
    budget = _learned(2.0)
    prompts = [tiny.make_sequence([5] * 6000, []) for _ in range(8)]
    one, few = budget.tokens(64, prompts[:1]), budget.tokens(64, prompts[:6])
    assert one < few < budget.tokens(64, prompts)
    assert one < budget.tokens(64, prompts[:1], num_waiting_tokens=30_000)
    prompts[0].queued_at = 1.0  # arrived when others had waited for a second
    assert budget.tokens(64, prompts[:6], now=1.0) > few


def test_decodes_that_exceed_the_target_alone_do_not_stop_prompts() -> None:
    chunks, _ = _prefill(LAPTOP, 0.005, 4, 2_000)
    assert set(chunks[2:-1]) == {FEWEST_TOKENS}


def test_chunks_grow_step_by_step_while_nothing_is_known() -> None:
    chunks, _ = _prefill(Machine(1e-6, 0.0, 0.0, 0.0), 1.0, 2, 30_000)
    assert chunks[0] <= 256
    assert all(after <= 2 * before for before, after in itertools.pairwise(chunks))
    assert len(chunks) < 10


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


@given(
    st.lists(
        st.tuples(
            st.integers(0, 256), st.integers(0, 8192), st.integers(0, 100_000), st.floats(0, 10)
        ),
        max_size=40,
    )
)
def test_any_times_leave_a_valid_budget(steps: list[tuple[int, int, int, float]]) -> None:
    budgets, times = (PrefillBudget(0.030), PrefillBudget(0.030, 2.0)), StepTimes()
    prompt = tiny.make_sequence([5] * 10, [])
    for decodes, tokens, start, seconds in steps:
        rows = [Chunk(prompt, 9, 1, True)] * decodes
        if tokens:
            rows.append(Chunk(prompt, start, tokens, False))
        for budget in budgets if rows else ():
            budget.observe(Batch(rows), seconds)
        times.observe((1.0, decodes, tokens, tokens * (start + tokens / 2)), seconds)
        most, found = (budget.tokens(decodes, [prompt], 500, 1.0) for budget in budgets)
        assert most >= found >= FEWEST_TOKENS and found % FEWEST_TOKENS == 0
        assert min(times.coefficients()) >= 0.0
