"""A request's cache_priority and cache_ttl_s decide how long its prefix stays in the cache."""

from __future__ import annotations

import msgspec
import pytest

from counting_engine import Clock, make_engine, request, run
from fake_runner import PagedRunner
from inflight.core.request import Request
from inflight.engine.engine import Engine

NUM_BLOCKS, BLOCK_SIZE = 20, 4
PREFIX = [1] * 20


def chat(request_id: int, prompt_ids: list[int], max_tokens: int = 4, **fields: object) -> Request:
    made = request(request_id, prompt_ids, max_tokens=max_tokens, ignore_eos=True)
    return msgspec.structs.replace(made, **fields)


def other_prompt(number: int, length: int = 20) -> list[int]:
    """Of the three tokens that there are; its first block is not that of PREFIX."""
    return [number // 3**place % 3 for place in range(7, -1, -1)] + [0] * (length - 8)


def an_engine(clock: Clock, host_slots: int = 0) -> Engine:
    runner = PagedRunner(NUM_BLOCKS, BLOCK_SIZE, host_slots=host_slots)
    return make_engine(runner, clock)


def serve(engine: Engine, one: Request) -> int:
    """Runs a request alone; returns its cached tokens."""
    engine.submit(one)
    events = run(engine)[one.request_id]
    assert events[-1].finish_reason is not None
    return max(event.num_cached_tokens for event in events)


def traffic(engine: Engine, num_tokens: int, first_id: int = 100) -> None:
    """Other prompts with so many tokens."""
    for request_id in range(first_id, first_id + num_tokens // 20):
        serve(engine, chat(request_id, other_prompt(request_id)))


FIVE_POOLS = 5 * NUM_BLOCKS * BLOCK_SIZE


@pytest.mark.parametrize(
    ("fields", "num_cached"),
    [
        ({}, 0),
        ({"cache_priority": 34}, 0),
        ({"cache_priority": 36}, 20),
        ({"cache_priority": 100}, 20),
    ],
)
@pytest.mark.parametrize("host_slots", [0, 24])
def test_a_prefix_of_high_priority_survives_five_times_the_pool(
    fields: dict[str, int], num_cached: int, host_slots: int
) -> None:
    engine = an_engine(Clock(), host_slots)
    serve(engine, chat(1, PREFIX, **fields))
    traffic(engine, FIVE_POOLS)
    assert serve(engine, chat(2, [*PREFIX, 2, 2, 2])) == num_cached


def test_an_output_is_kept_like_its_prompt() -> None:
    engine = an_engine(Clock())
    engine.submit(chat(1, PREFIX, max_tokens=5, cache_priority=60))
    output = [token for event in run(engine)[1] for token in event.token_ids]
    assert len(output) == 5
    traffic(engine, FIVE_POOLS)
    assert serve(engine, chat(2, [*PREFIX, *output, 2, 2, 2])) == 24


@pytest.mark.parametrize("priority", [60, 100])
@pytest.mark.parametrize("host_slots", [0, 24])
def test_after_its_time_a_prefix_has_the_default_priority(priority: int, host_slots: int) -> None:
    clock = Clock()
    engine = an_engine(clock, host_slots)
    serve(engine, chat(1, PREFIX, cache_priority=priority, cache_ttl_s=300.0))
    clock.now += 299
    traffic(engine, FIVE_POOLS)
    # This is a use as well, from which the time counts.
    again = chat(2, PREFIX, cache_priority=priority, cache_ttl_s=300.0)
    assert serve(engine, again) > 0
    clock.now += 299
    traffic(engine, FIVE_POOLS, 300)
    clock.now += 1
    traffic(engine, FIVE_POOLS, 500)
    assert serve(engine, chat(3, PREFIX)) == 0


def test_the_latest_user_sets_the_priority_unless_it_is_pinned() -> None:
    for priority, num_cached in ((60, 0), (100, 19)):
        engine = an_engine(Clock())
        serve(engine, chat(1, PREFIX, cache_priority=priority))
        serve(engine, chat(2, PREFIX))
        traffic(engine, FIVE_POOLS)
        assert serve(engine, chat(3, PREFIX)) == num_cached


def test_pinned_prefixes_leave_half_of_the_pool_to_others() -> None:
    engine = an_engine(Clock())
    for number in range(8):
        serve(engine, chat(number + 1, other_prompt(number), cache_priority=100))
    order = engine.scheduler._pool._evictable
    assert order.num_pinned == NUM_BLOCKS // 2
    # A request that needs more than the other half still runs, with blocks of theirs.
    assert serve(engine, chat(50, other_prompt(700, 60))) == 0
    assert order.num_pinned == NUM_BLOCKS - 16
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
