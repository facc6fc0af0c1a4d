"""Decodes keep a target inter-token latency while a long prompt is computed."""

from __future__ import annotations

import pytest

from counting_engine import EOS, Clock, request
from fake_runner import CountingRunner
from inflight.config import EngineConfig
from inflight.core.batch import Batch, CompletedStep
from inflight.engine.engine import Engine

PROMPT = 30_000
NUM_DECODES = 64


class TimedRunner(CountingRunner):
    """Steps take as long as those of an 8B model on an H200."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(num_blocks=20_000, block_size=16)
        self._clock = clock

    def launch(self, batch: Batch) -> CompletedStep:
        self._clock.now += 4e-3
        for chunk in batch.chunks:
            self._clock.now += 23e-6 * chunk.length
            self._clock.now += 3e-10 * chunk.length * (chunk.start + chunk.length / 2)
        return super().launch(batch)


def _latencies(
    itl_target_ms: float | None, ttft_target_ms: float | None = None
) -> tuple[list[float], float]:
    """Seconds between the tokens of decodes while a prompt is computed, and its TTFT."""
    clock = Clock()
    config = EngineConfig(
        model="none",
        itl_target_ms=itl_target_ms,
        ttft_target_ms=ttft_target_ms,
        max_num_seqs=128,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
    )
    engine = Engine(config, TimedRunner(clock), 1 << 16, [EOS], clock=clock)
    for index in range(NUM_DECODES):
        engine.submit(request(index, [1] * 500, max_tokens=2000, ignore_eos=True))
    for _ in range(200):
        engine.step()
    engine.submit(request(1000, [1] * PROMPT, max_tokens=1))
    begun = before = clock.now
    found = []
    while True:
        events = engine.step()
        found.append(clock.now - before)
        before = clock.now
        if any(event.request_id == 1000 and event.token_ids for event in events):
            return sorted(found), clock.now - begun


@pytest.mark.parametrize("target_ms", [10.0, 30.0])
def test_a_long_prompt_raises_the_itl_of_others_to_the_target(target_ms: float) -> None:
    latencies, ttft = _latencies(target_ms)
    assert latencies[int(0.99 * len(latencies))] < 1.15 * target_ms / 1e3
    # Most of each step is the prompt's: it takes as long as its tokens do at this latency.
    _, fastest = _latencies(None)
    share = (target_ms - 5.5) / target_ms
    assert ttft < 1.2 * fastest / share


def test_a_long_prompt_with_time_until_its_ttft_raises_the_itl_of_others_little() -> None:
    alone = 4e-3 + NUM_DECODES * 23e-6 + NUM_DECODES * 600 * 3e-10
    latencies, ttft = _latencies(30, ttft_target_ms=5000)
    assert latencies[int(0.99 * len(latencies))] - alone < 6e-3
    assert ttft < 5.0


@pytest.mark.parametrize("ttft_target_ms", [1500.0, 2500.0])
def test_a_long_prompt_raises_the_itl_of_others_as_its_ttft_requires(ttft_target_ms: float) -> None:
    latencies, ttft = _latencies(30, ttft_target_ms)
    assert 0.7 * ttft_target_ms / 1e3 < ttft < ttft_target_ms / 1e3
    unhurried, _ = _latencies(30, ttft_target_ms=10_000)
    hurried, _ = _latencies(30)
    middles = [found[len(found) // 2] for found in (unhurried, latencies, hurried)]
    assert middles == sorted(middles)


def test_a_ttft_target_that_cannot_be_met_leaves_the_itl_target() -> None:
    latencies, ttft = _latencies(30, ttft_target_ms=100)
    assert (latencies, ttft) == _latencies(30)


def test_without_a_target_a_long_prompt_stalls_others() -> None:
    latencies, _ = _latencies(None)
    assert latencies[-1] > 0.2


def test_nothing_is_limited_while_nothing_decodes() -> None:
    clock = Clock()
    config = EngineConfig(
        model="none", itl_target_ms=5, max_num_seqs=4, max_num_batched_tokens=8192
    )
    runner = TimedRunner(clock)
    engine = Engine(config, runner, 1 << 16, [EOS], clock=clock)
    engine.submit(request(1, [1] * 20_000, max_tokens=1))
    while engine.has_work:
        engine.step()
    assert [batch.num_tokens for batch in runner.batches] == [8192, 8192, 20_000 - 2 * 8192]
