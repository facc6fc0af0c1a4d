"""Requests that arrive together with a common prefix compute it once."""

from __future__ import annotations

import pytest

from fake_runner import PagedRunner
from inflight.core.batch import Batch
from inflight.core.sequence import Sequence
from inflight.kv.block_tables import WORTH_SHARING_TOKENS
from inflight.kv.pending_prefixes import WORTH_TOKENS
from inflight.scheduling.scheduler import Scheduler
from scheduling import lengths, prompt, scheduler, sequence

SIZE = 16
PREFIX = prompt(WORTH_TOKENS)


def _scheduler(**changes: int | bool) -> Scheduler:
    settings = {
        "num_blocks": 400,
        "block_size": SIZE,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 4096,
    }
    return scheduler(**(settings | changes))


def _requests(count: int, prefix: list[int], max_tokens: int = 4) -> list[Sequence]:
    return [sequence(i, [*prefix, i, 7, 7, 7], max_tokens) for i in range(count)]


def _commit(one: Scheduler, batch: Batch) -> None:
    one.commit(batch, PagedRunner(400, SIZE).launch(batch).result())


def test_the_others_wait_for_the_step_and_then_find_it_cached() -> None:
    one = _scheduler()
    for each in _requests(5, PREFIX):
        one.add(each)
    first = one.schedule()
    assert lengths(first) == {0: len(PREFIX) + 4}
    ahead = one.schedule()  # before the result is known, only the first one's next token
    assert lengths(ahead) == {0: 1}
    _commit(one, first)
    second = one.schedule()
    assert lengths(second) == {0: 1, 1: 4, 2: 4, 3: 4, 4: 4}
    assert one.num_cached_tokens == 4 * len(PREFIX)


@pytest.mark.parametrize(
    ("prefix", "changes"),
    [
        (PREFIX[:-SIZE], {}),  # is computed faster than a step is awaited
        (PREFIX, {"enable_prefix_caching": False}),
    ],
)
def test_nobody_waits_where_little_or_nothing_is_gained(
    prefix: list[int], changes: dict[str, bool]
) -> None:
    one = _scheduler(**changes)
    for each in _requests(3, prefix):
        one.add(each)
    assert set(lengths(one.schedule())) == {0, 1, 2}


def test_a_prefix_of_another_salt_is_not_awaited() -> None:
    one = _scheduler()
    for index, salt in enumerate(("", "a", "a")):
        one.add(sequence(index, [*PREFIX, 1], cache_salt=salt))
    assert set(lengths(one.schedule())) == {0, 1}  # the third waits for the second


def test_nobody_waits_for_steps_that_are_not_scheduled() -> None:
    """A long prompt is computed in many steps, and others do not stand behind its copies."""
    long = prompt(4 * WORTH_TOKENS)
    one = _scheduler(max_prefill_chunk=2 * WORTH_TOKENS)
    for each in (*_requests(2, long), sequence(9, [5] * 30)):
        one.add(each)
    assert set(lengths(one.schedule())) == {0, 1, 9}


@pytest.mark.parametrize("ending", ["finish", "suspend"])
def test_who_ends_before_its_result_is_not_awaited_any_more(ending: str) -> None:
    one = _scheduler()
    first, second = _requests(2, PREFIX)
    one.add(first)
    one.add(second)
    one.schedule()
    getattr(one, ending)(first)
    assert lengths(one.schedule())[1] == len(PREFIX) + 4


def test_a_prefix_that_is_evicted_is_computed_again() -> None:
    one = _scheduler(num_blocks=40)
    (first,) = _requests(1, PREFIX)
    one.add(first)
    _commit(one, one.schedule())
    one.finish(first)
    other = sequence(50, [3] * (38 * SIZE))
    one.add(other)
    _commit(one, one.schedule())  # evicts what is cached
    one.finish(other)
    again = sequence(51, [*PREFIX, 9])
    one.add(again)
    assert lengths(one.schedule())[51] > SIZE


def test_steps_share_prefixes_while_enough_cached_tokens_run() -> None:
    common = prompt(WORTH_SHARING_TOKENS // 4)
    one, fake = _scheduler(num_blocks=2000, max_num_batched_tokens=8192), PagedRunner(2000, SIZE)
    first, *others = _requests(5, common, max_tokens=40)
    one.add(first)
    one.commit(first_batch := one.schedule(), fake.launch(first_batch).result())
    assert not first_batch.shares_prefixes
    for each in others:
        one.add(each)
    batch = one.schedule()
    assert len(batch.chunks) == 5
    assert batch.shares_prefixes
    one.commit(batch, fake.launch(batch).result())
    one.finish(others[0])
    assert not one.schedule().shares_prefixes
