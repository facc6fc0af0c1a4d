"""The reported times of a request are those of what happened to it."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_runner import CountingRunner, PagedRunner
from inflight.config import EngineConfig, SpeculativeConfig
from inflight.core.request import FinishReason, Request, RequestTiming, TokenEvent
from inflight.engine.engine import Engine
from inflight.sampling.params import SamplingParams
from inflight.scheduling.draft_budget import StepCosts, StepTimes

STEP_S = 0.25


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Play:
    """An engine whose steps take STEP_S, and longer with a prompt.

    Attributes:
        last: the last event of each request.
        position_of: position after the last token of each request.
    """

    def __init__(self, runner, watts=lambda: None, prefill_s=STEP_S, **settings):
        config = EngineConfig(model="none", **settings)
        self.clock = Clock()
        self.runner = runner
        self.engine = Engine(config, runner, 64, [2], clock=self.clock, watts=watts)
        self.last: dict[int, TokenEvent] = {}
        self.position_of: dict[int, int] = {}
        self._launch = runner.launch
        self._prefill_s = prefill_s
        runner.launch = self._timed_launch

    def submit(self, number, prompt, max_tokens, return_timing=True, acknowledged=False):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = Request(number, prompt, params, return_timing=return_timing)
        self.engine.submit(msgspec.structs.replace(request, acknowledged=acknowledged))

    def steps(self, count=1000):
        while count and self.engine.has_work:
            self.take(self.engine.step())
            count -= 1

    def take(self, events):
        for event in events:
            self.position_of[event.request_id] = event.position
            if event.is_last:
                self.last[event.request_id] = event

    def timing(self, number) -> RequestTiming:
        found = self.last[number].timing
        assert found is not None
        return found

    def _timed_launch(self, batch):
        has_prompt = any(chunk.length > 1 for chunk in batch.chunks)
        self.clock.now += self._prefill_s if has_prompt else STEP_S
        return self._launch(batch)


def total(timing: RequestTiming) -> float:
    return sum(
        (
            timing.queue_s,
            timing.prefill_s,
            timing.decode_s,
            timing.preempted_s,
            timing.suspended_s,
        )
    )


def test_a_request_alone_has_prefill_and_decode():
    play = Play(CountingRunner(), max_num_seqs=4, max_num_batched_tokens=4)
    play.submit(1, [5] * 8, 6)
    play.clock.now += 3.0
    play.steps()
    found = play.timing(1)
    assert (found.queue_s, found.kv_wait_s) == (3.0, 0.0)
    assert found.num_prefill_steps == 2 and found.prefill_s == 2 * STEP_S
    assert found.num_decode_steps == 5 and found.decode_s == 5 * STEP_S
    assert found.ttft_s == 3.0 + 2 * STEP_S and found.mean_itl_s == STEP_S
    assert found.prefill_interference_s == 0.0
    assert (found.preempted_s, found.suspended_s, found.num_preemptions) == (0.0, 0.0, 0)
    assert found.energy_j is None


def test_a_request_that_does_not_ask_gets_none():
    play = Play(CountingRunner())
    play.submit(1, [5] * 8, 6, return_timing=False)
    play.steps()
    assert play.last[1].timing is None
    assert b"timing" not in msgspec.msgpack.encode(play.last[1])


def test_a_wait_for_a_sequence_slot_is_no_wait_for_blocks():
    play = Play(CountingRunner(), max_num_seqs=1)
    play.submit(1, [5] * 4, 8)
    play.submit(2, [6] * 4, 4)
    play.steps()
    assert play.timing(2).queue_s == pytest.approx(8 * STEP_S)
    assert play.timing(2).kv_wait_s == 0.0


def test_a_wait_for_blocks_is_reported():
    play = Play(CountingRunner(num_blocks=6), enable_prefix_caching=False)
    play.submit(1, [5] * 16, 8)
    play.submit(2, [6] * 12, 4)
    play.steps()
    found = play.timing(2)
    assert found.queue_s == pytest.approx(8 * STEP_S)
    # The first step shows that the blocks do not suffice.
    assert found.kv_wait_s == pytest.approx(found.queue_s, abs=STEP_S)
    assert play.timing(1).kv_wait_s == 0.0


def test_preemptions_and_their_lost_time_are_reported():
    play = Play(CountingRunner(num_blocks=8), enable_prefix_caching=False)
    play.submit(1, [5] * 8, 20)
    play.submit(2, [6] * 8, 20)
    play.steps()
    first, second = play.timing(1), play.timing(2)
    assert first.num_preemptions == 0 and first.preempted_s == 0.0
    assert second.num_preemptions >= 1
    # It continues after the first one, and computes its tokens again.
    assert second.preempted_s >= 3 * STEP_S
    assert second.num_prefill_steps == 1 + second.num_preemptions
    # Each prefill gives a token, as does each decode step.
    for found in (first, second):
        assert found.num_decode_steps + found.num_prefill_steps == 20


def test_interference_is_what_prompts_of_others_added():
    play = Play(CountingRunner(), prefill_s=1.0)
    play.submit(1, [5] * 4, 20)
    play.steps(5)
    for number in (2, 3):
        play.submit(number, [6 + number] * 8, 1, return_timing=False)
        play.steps(1)
    play.steps()
    found = play.timing(1)
    assert found.prefill_interference_s == pytest.approx(2 * (1.0 - STEP_S))
    assert found.decode_s == pytest.approx(17 * STEP_S + 2 * 1.0)


def suspended_play() -> Play:
    """A request of ten tokens, suspended after three: its consumer has acknowledged two."""
    play = Play(CountingRunner())
    play.submit(1, [5] * 4, 10, acknowledged=True)
    play.steps(2)
    play.engine.delivered([(1, play.position_of[1])])
    play.steps(1)
    play.clock.now += 60.0
    play.take(play.engine.sweep())
    assert play.engine.stats().num_suspended == 1
    return play


def test_suspension_is_reported():
    play = suspended_play()
    play.submit(2, [6] * 4, 8, return_timing=False)
    play.steps()
    play.engine.delivered([(1, play.position_of[1])])
    play.steps()
    found = play.timing(1)
    assert found.suspended_s == pytest.approx(9 * STEP_S)
    assert found.preempted_s == 0.0


def test_a_suspension_between_two_steps_is_reported():
    """No step is planned meanwhile. The tokens are computed again, by a prefill step."""
    play = suspended_play()
    play.clock.now += 2.0
    play.engine.delivered([(1, play.position_of[1])])
    play.steps()
    found = play.timing(1)
    assert found.suspended_s == pytest.approx(2.0 + STEP_S)
    assert found.decode_s == pytest.approx(60.0 + 8 * STEP_S)
    assert (found.num_prefill_steps, found.num_decode_steps) == (2, 8)


def test_a_cancelled_request_has_its_times_and_a_failed_one_none():
    play = Play(CountingRunner())
    play.submit(1, [5] * 4, 10)
    play.submit(2, [6] * 4, 10)
    play.steps(2)
    play.runner.poisoned.add(2)
    play.take(play.engine.cancel(1))
    play.steps()
    assert play.last[1].finish_reason is FinishReason.CANCELLED
    assert play.timing(1).num_prefill_steps == 1
    assert play.last[2].error is not None and play.last[2].timing is None
    assert not play.engine._timings


def test_cached_tokens_and_drafts_are_reported():
    runner = PagedRunner()
    runner.step_costs = StepCosts(StepTimes((1, 64), (1.0, 1.1)))
    runner.draft = lambda ids, count: [0] * count
    play = Play(runner, speculative_config=SpeculativeConfig(num_speculative_tokens=4, default=2))
    play.submit(1, [1, 2] * 6, 12)
    play.steps()
    play.submit(2, [1, 2] * 6, 12)
    play.steps()
    last = play.last[2]
    assert play.timing(2).num_cached_tokens == last.num_cached_tokens > 0
    assert play.timing(2).num_drafted == last.num_drafted > 0
    assert play.timing(2).num_accepted == last.num_accepted


def test_energy_is_the_share_of_the_steps_tokens():
    play = Play(CountingRunner(), watts=lambda: 100.0)
    play.submit(1, [5] * 4, 5)
    play.submit(2, [6] * 4, 5)
    play.steps()
    joules = [play.timing(number).energy_j for number in (1, 2)]
    assert joules == [pytest.approx(100.0 * 5 * STEP_S / 2)] * 2


@given(
    st.lists(
        st.tuples(st.integers(1, 16), st.integers(1, 20), st.integers(0, 3)),
        min_size=1,
        max_size=8,
    ),
    st.integers(0, 1),
)
def test_phases_add_up_to_the_time_of_the_request(wanted, steps_ahead):
    play = Play(PagedRunner(num_blocks=12, steps_ahead=steps_ahead), max_num_seqs=4)
    arrived, ended = {}, {}
    for number, (num_prompt, max_tokens, pause) in enumerate(wanted, 1):
        play.submit(number, [number % 3] * num_prompt, max_tokens)
        arrived[number] = play.clock.now
        play.steps(pause)
    while play.engine.has_work:
        play.steps(1)
        for number in play.last:
            ended.setdefault(number, play.clock.now)
    for number in arrived:
        found = play.timing(number)
        assert min(msgspec.structs.astuple(found)[:6]) >= 0.0
        assert total(found) <= ended.get(number, play.clock.now) - arrived[number] + 1e-6
        assert total(found) >= found.ttft_s
        itl = found.mean_itl_s or 0.0
        max_tokens = wanted[number - 1][1]
        assert total(found) == pytest.approx(found.ttft_s + itl * (max_tokens - 1), abs=1e-4)
    json.dumps(msgspec.structs.asdict(play.timing(1)))
