"""Requests of the same prompt compute it once."""

from __future__ import annotations

import msgspec
import pytest

from counting_engine import make_engine, request, run
from fake_runner import PagedRunner, alone
from inflight.core.request import FinishReason, Request
from inflight.engine.engine import generate


def siblings(prompt: list[int], count: int, **params: object) -> list[Request]:
    return [
        msgspec.structs.replace(request(i, prompt, **params), sibling=1 if i > 1 else None)
        for i in range(1, count + 1)
    ]


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("length", [3, 16, 17])
def test_siblings_compute_their_prompt_once(steps_ahead: int, length: int) -> None:
    prompt = [i % 3 for i in range(length)]
    engine = make_engine(PagedRunner(steps_ahead=steps_ahead), max_num_batched_tokens=64)
    outputs = generate(engine, siblings(prompt, 4, max_tokens=6))
    assert outputs == {i: alone(prompt, 6) for i in range(1, 5)}
    # Of blocks of 4 tokens; the last token of a prompt is always computed.
    assert engine.stats().num_cached_tokens == 3 * min(length // 4 * 4, length - 1)


@pytest.mark.parametrize("how", ["cancelled", "failed", "refused"])
def test_siblings_continue_after_the_first_has_ended(how: str) -> None:
    runner = PagedRunner()
    engine = make_engine(runner, max_waiting=8)
    first, *others = siblings([1, 2], 3, max_tokens=5)
    if how == "failed":
        runner.poisoned = {1}
    if how != "refused":
        engine.submit(first)
    for one in others:
        engine.submit(one)
    if how == "cancelled":
        engine.cancel(1)
    events = run(engine)
    for one in others:
        ids = [token for event in events[one.request_id] for token in event.token_ids]
        assert ids == alone([1, 2], 5)
    assert not engine.has_work


def test_a_request_without_siblings_does_not_wait() -> None:
    engine = make_engine(PagedRunner(), max_num_batched_tokens=64)
    for request_id in range(3):  # an id of 0 is one like any other
        engine.submit(request(request_id, [1, 2], max_tokens=5))
    assert len(engine.scheduler.waiting) == 3


def test_a_sibling_that_waits_can_be_cancelled() -> None:
    engine = make_engine(PagedRunner())
    for one in siblings([1, 2], 2, max_tokens=5):
        engine.submit(one)
    assert engine.cancel(2)[0].finish_reason is FinishReason.CANCELLED
    assert set(run(engine)) == {1}
    assert engine.scheduler.num_free_blocks == 64
