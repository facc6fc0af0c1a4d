"""What an engine records agrees with what its requests saw."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_runner import CountingRunner, PagedRunner, next_token
from inflight.config import EngineConfig, SpeculativeConfig
from inflight.core.request import FinishReason, Request, TokenEvent
from inflight.engine.engine import Engine
from inflight.engine.metrics.snapshot import Metrics
from inflight.errors import InflightError
from inflight.sampling.params import SamplingParams
from inflight.scheduling.draft_budget import StepCosts, StepTimes

STEP_S = 0.25


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Seen:
    """What a client sees of its request.

    Attributes:
        arrived: when it was submitted.
        times: of the events with tokens.
        num_tokens: in them.
        last: the last event.
    """

    request: Request
    arrived: float
    times: list[float] = field(default_factory=list)
    num_tokens: int = 0
    last: TokenEvent | None = None

    def take(self, event: TokenEvent, now: float) -> None:
        if event.token_ids:
            self.times.append(now)
            self.num_tokens += len(event.token_ids)
        if event.is_last:
            self.last = event

    @property
    def is_success(self) -> bool:
        return self.last is not None and self.last.finish_reason in ("stop", "length")


def make_engine(runner, clock, **settings):
    config = EngineConfig(model="none", **settings)
    return Engine(config, runner, max_model_len=64, eos_token_ids=[2], clock=clock)


def draft(token_ids: list[int], count: int) -> list[int]:
    """Right but for some."""
    drafts: list[int] = []
    for _ in range(count):
        right = next_token([*token_ids, *drafts], 3)
        drafts.append(right if (len(token_ids) + len(drafts)) % 5 else (right + 1) % 3)
    return drafts


requests = st.lists(
    st.fixed_dictionaries(
        {
            "prompt": st.lists(st.integers(0, 2), min_size=1, max_size=20),
            "max_tokens": st.integers(1, 30),
            "ignore_eos": st.booleans(),
            "is_poisoned": st.sampled_from([False] * 9 + [True]),
            "is_refused": st.sampled_from([False] * 9 + [True]),
            "cancelled_after": st.sampled_from([None, None, None, 0, 2, 7]),
            "pause": st.integers(0, 3),
        }
    ),
    min_size=1,
    max_size=12,
)


def play(engine, clock, wanted):
    """Run requests; returns what they saw, and the number of refused ones."""
    seen: dict[int, Seen] = {}
    cancels: dict[int, int] = {}
    waiting = list(enumerate(wanted, 1))
    num_refused = 0
    step = 0
    while engine.has_work or waiting:
        while waiting and not waiting[0][1]["pause"]:
            number, one = waiting.pop(0)
            prompt = [7] if one["is_refused"] else one["prompt"]
            params = SamplingParams(max_tokens=one["max_tokens"], ignore_eos=one["ignore_eos"])
            request = Request(number, prompt, params)
            arrived = clock.now - 0.125
            try:
                engine.submit(request, arrived)
            except InflightError:
                num_refused += 1
                continue
            seen[number] = Seen(request, arrived)
            if one["is_poisoned"]:
                engine.runner.poisoned.add(number)
            if one["cancelled_after"] is not None:
                cancels[number] = step + one["cancelled_after"]
        if waiting:
            waiting[0][1]["pause"] -= 1
        clock.now += STEP_S
        events = engine.step()
        for number in [number for number, when in cancels.items() if when <= step]:
            events += engine.cancel(number)
            del cancels[number]
        for event in events:
            seen[event.request_id].take(event, clock.now)
        step += 1
    return list(seen.values()), num_refused


def check(metrics: Metrics, seen: list[Seen], num_refused: int) -> None:
    reasons = defaultdict(int)
    for one in seen:
        assert one.last is not None
        reasons[one.last.finish_reason or "error"] += 1
    for reason, name in {
        **dict.fromkeys(["stop", "length", "error"]),
        "cancelled": "abort",
    }.items():
        assert metrics.value("request_success", name or reason) == reasons[reason]
    assert metrics.value("request_errors", "engine") == reasons["error"]
    assert metrics.value("requests_refused", "invalid", "engine") == num_refused
    assert metrics.value("generation_tokens") == sum(one.num_tokens for one in seen)

    started = [one for one in seen if one.times]
    succeeded = [one for one in seen if one.is_success]
    gaps = [b - a for one in started for a, b in itertools.pairwise(one.times)]
    expected = {
        "time_to_first_token_seconds": [one.times[0] - one.arrived for one in started],
        "inter_token_latency_seconds": gaps,
        "e2e_request_latency_seconds": [one.times[-1] - one.arrived for one in succeeded],
        "request_decode_time_seconds": [one.times[-1] - one.times[0] for one in succeeded],
        "request_prompt_tokens": [len(one.request.prompt_ids) for one in succeeded],
        "request_generation_tokens": [one.num_tokens for one in succeeded],
        "request_time_per_output_token_seconds": [
            (one.times[-1] - one.times[0]) / (one.num_tokens - 1)
            for one in succeeded
            if one.num_tokens > 1
        ],
    }
    for stem, values in expected.items():
        counts, total = metrics.histogram(stem)
        assert sum(counts) == len(values), stem
        assert total == pytest.approx(sum(values)), stem
    # What is measured in parts adds up to the whole.
    parts = {
        part: metrics.histogram(f"request_{part}_time_seconds")[1]
        for part in ("queue", "prefill", "decode", "inference")
    }
    e2e = metrics.histogram("e2e_request_latency_seconds")[1]
    assert parts["queue"] + parts["inference"] == pytest.approx(e2e)
    assert parts["prefill"] + parts["decode"] == pytest.approx(parts["inference"])


def check_steps(metrics: Metrics, num_drafted: int) -> None:
    phases = [metrics.histogram("step_seconds", phase) for phase in ("decode", "prefill")]
    num_steps = sum(sum(counts) for counts, _ in phases)
    assert num_steps == metrics.value("engine_steps")
    assert sum(metrics.histogram("iteration_tokens_total")[0]) == num_steps
    accepted = metrics.value("spec_decode_num_accepted_tokens")
    per_position = [
        metrics.value("spec_decode_num_accepted_tokens_per_pos", str(position))
        for position in range(16)
    ]
    assert sum(per_position) == accepted
    assert all(first >= second for first, second in itertools.pairwise(per_position))
    assert accepted <= metrics.value("spec_decode_num_draft_tokens") == num_drafted


@given(requests, st.sampled_from([0, 1]), st.booleans(), st.sampled_from([64, 20]))
def test_what_is_recorded_is_what_was_seen(wanted, steps_ahead, drafts, num_blocks):
    clock = Clock()
    runner = PagedRunner(num_blocks=num_blocks, steps_ahead=steps_ahead)
    settings = {"max_num_seqs": 4}
    if drafts:
        runner.step_costs = StepCosts(StepTimes((1, 64), (1.0, 1.1)))  # without them, no drafts
        runner.draft = draft
        settings["speculative_config"] = SpeculativeConfig(num_speculative_tokens=4, default=3)
    engine = make_engine(runner, clock, **settings)
    seen, num_refused = play(engine, clock, wanted)
    metrics = engine.metrics()
    check(metrics, seen, num_refused)
    check_steps(metrics, engine.stats().num_drafted_tokens)
    assert metrics.value("num_requests_active") == metrics.value("kv_cache_usage_perc") == 0
    assert not engine.recorder._requests, "a record of a request that has ended"
    assert not engine.recorder._last_token


@given(requests)
def test_counters_never_decrease(wanted):
    clock = Clock()
    engine = make_engine(PagedRunner(), clock, max_num_seqs=4)
    snapshots = []
    step = engine.step

    def observed_step():
        snapshots.append(engine.metrics())
        return step()

    engine.step = observed_step
    play(engine, clock, wanted)
    for before, after in itertools.pairwise([*snapshots, engine.metrics()]):
        assert after.engine == before.engine
        assert all(a <= b for a, b in zip(before.counts, after.counts, strict=True))
        assert all(a <= b for a, b in zip(before.sums, after.sums, strict=True))
        for stem in ("generation_tokens", "prompt_tokens", "engine_steps", "num_preemptions"):
            assert before.value(stem) <= after.value(stem)


def test_queue_time_is_the_time_until_the_first_step():
    clock = Clock()
    engine = make_engine(PagedRunner(), clock, max_num_seqs=1)
    for number in (1, 2):
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        engine.submit(Request(number, [1, 2], params))
    while engine.has_work:
        clock.now += 1.0
        engine.step()
    counts, total = engine.metrics().histogram("request_queue_time_seconds")
    assert sum(counts) == 2
    assert total == pytest.approx(1.0 + 4.0)  # the second one starts in the fourth step


def test_phases_of_steps():
    clock = Clock()
    engine = make_engine(PagedRunner(), clock, max_num_seqs=4, max_num_batched_tokens=8)
    engine.submit(Request(1, [1] * 20, SamplingParams(max_tokens=5, ignore_eos=True)))
    while engine.has_work:
        engine.step()
    metrics = engine.metrics()
    assert sum(metrics.histogram("step_seconds", "prefill")[0]) == 3
    assert sum(metrics.histogram("step_seconds", "decode")[0]) == 4
    assert metrics.histogram("iteration_tokens_total")[1] == 20 + 4


def test_a_beam_search_counts_as_one_request():
    clock = Clock()
    engine = make_engine(PagedRunner(vocab_size=8), clock)
    params = SamplingParams(max_tokens=6, min_tokens=6, beam_width=2)
    engine.submit(Request(1, [1, 3], params, output_ids=(1, 2)))
    events: list[TokenEvent] = []
    while engine.has_work:
        clock.now += 1.0
        events += engine.step()
    assert {event.finish_reason for event in events} == {FinishReason.LENGTH}
    metrics = engine.metrics()
    assert metrics.value("request_success", "length") == 1
    assert metrics.value("generation_tokens") == 12
    assert metrics.histogram("request_generation_tokens")[1] == 12
    first, e2e = (
        metrics.histogram(stem)[1]
        for stem in ("time_to_first_token_seconds", "e2e_request_latency_seconds")
    )
    assert first == e2e
    assert sum(metrics.histogram("inter_token_latency_seconds")[0]) == 0
    assert not engine.recorder._requests and not engine.recorder._last_token


def test_a_failed_step_counts_its_requests_by_kind():
    clock = Clock()
    runner = CountingRunner()
    engine = make_engine(runner, clock)
    for number in (1, 2):
        engine.submit(Request(number, [1], SamplingParams(max_tokens=3)))
    runner.raises = RuntimeError("lost")
    engine.step()
    metrics = engine.metrics()
    assert metrics.value("request_errors", "engine") == 2
    assert metrics.value("request_success", "error") == 2


def test_an_arrival_in_the_future_counts_as_now():
    clock = Clock()
    engine = make_engine(CountingRunner(), clock)
    engine.submit(Request(1, [1], SamplingParams(max_tokens=1)), arrived=clock.now + 1e6)
    engine.step()
    assert engine.metrics().histogram("time_to_first_token_seconds")[1] == 0.0


def test_refusals_of_fronts_are_counted_by_kind():
    engine = make_engine(CountingRunner(), Clock())
    engine.recorder.refused_by_front({"capacity": 3, "unheard of": 2, "invalid": -5})
    metrics = engine.metrics()
    assert metrics.value("requests_refused", "capacity", "front") == 3
    assert metrics.value("requests_refused", "engine", "front") == 2
    assert metrics.value("requests_refused", "invalid", "front") == 0
    assert metrics.value("requests_refused", "capacity", "engine") == 0
