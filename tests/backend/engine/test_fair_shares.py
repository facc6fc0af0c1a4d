"""Tenants and classes that keep an engine busy get their shares, whatever load they offer."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from itertools import count

import msgspec
import pytest

from counting_engine import make_engine, request
from fake_runner import CountingRunner
from inflight.core.request import PriorityClass, Request
from inflight.engine.engine import Engine

BATCH, INTERACTIVE = PriorityClass.BATCH, PriorityClass.INTERACTIVE


class Load:
    """So many requests of a kind in the engine at all times.

    Attributes:
        num_tokens: of prompts and output of those that have ended.
    """

    def __init__(self, engine: Engine, ids: Iterator[int], kind: Request, concurrency: int) -> None:
        self.num_tokens = 0
        self.waited: list[int] = []
        self._engine = engine
        self._ids = ids
        self._kind = kind
        self._submitted: dict[int, int] = {}  # the step, by request
        for _ in range(concurrency):
            self._submit(0)

    def take(self, request_id: int, num_output_tokens: int, step: int) -> None:
        """A request has ended: the next one follows."""
        if request_id in self._submitted:
            self.num_tokens += len(self._kind.prompt_ids) + num_output_tokens
            self.waited.append(step - self._submitted.pop(request_id))
            self._submit(step)

    def _submit(self, step: int) -> None:
        request_id = next(self._ids)
        self._engine.submit(msgspec.structs.replace(self._kind, request_id=request_id))
        self._submitted[request_id] = step


def kind(length: int, max_tokens: int, **fields: object) -> Request:
    made = request(0, [1] * length, max_tokens=max_tokens, ignore_eos=True)
    return msgspec.structs.replace(made, **fields)


def run(engine: Engine, loads: list[Load], num_steps: int = 2000) -> None:
    for step in range(num_steps):
        for event in engine.sweep() + engine.step():
            assert event.error is None
            if event.is_last:
                for load in loads:
                    load.take(event.request_id, event.position, step)


def busy_engine(**settings: object) -> Engine:
    fields = {"max_num_seqs": 8, "enable_prefix_caching": False, **settings}
    return make_engine(CountingRunner(num_blocks=400), **fields)


@pytest.mark.parametrize(
    ("many", "few"),
    [
        pytest.param((5, 10), (5, 10), id="equal requests"),
        pytest.param((3, 4), (20, 30), id="short against long"),
        pytest.param((30, 2), (2, 30), id="prompts against output"),
    ],
)
def test_ten_times_the_load_gets_no_more_tokens(
    many: tuple[int, int], few: tuple[int, int]
) -> None:
    engine, ids = busy_engine(), count(1)
    loads = [
        Load(engine, ids, kind(*many, tenant="many"), 160),
        Load(engine, ids, kind(*few, tenant="few"), 16),
    ]
    run(engine, loads)
    assert loads[0].num_tokens / loads[1].num_tokens == pytest.approx(1.0, abs=0.03)


def test_the_lower_class_keeps_its_share_and_the_upper_one_is_not_delayed_by_load() -> None:
    engine, ids = busy_engine(interactive_weight=4, batch_weight=1), count(1)
    batch = Load(engine, ids, kind(5, 10, priority_class=BATCH, tenant="b"), 300)
    interactive = Load(engine, ids, kind(5, 10, tenant="i"), 40)
    run(engine, [batch, interactive])
    assert interactive.num_tokens / batch.num_tokens == pytest.approx(4.0, abs=0.15)
    assert statistics.median(interactive.waited) < 100 < statistics.median(batch.waited)


def test_tenants_are_equal_within_each_class() -> None:
    engine, ids = busy_engine(interactive_weight=1, batch_weight=1), count(1)
    loads = {
        (priority, tenant): Load(
            engine, ids, kind(4, 6, priority_class=priority, tenant=tenant), concurrency
        )
        for priority, tenant, concurrency in (
            (INTERACTIVE, "x", 100),
            (BATCH, "x", 100),
            (BATCH, "y", 20),
        )
    }
    run(engine, list(loads.values()), num_steps=3000)
    tokens = {key: load.num_tokens for key, load in loads.items()}
    assert tokens[BATCH, "x"] / tokens[BATCH, "y"] == pytest.approx(1.0, abs=0.03)
    both = tokens[BATCH, "x"] + tokens[BATCH, "y"]
    assert tokens[INTERACTIVE, "x"] / both == pytest.approx(1.0, abs=0.03)


def test_a_tenant_alone_gets_everything() -> None:
    engine, ids = busy_engine(), count(1)
    alone = Load(engine, ids, kind(5, 10, tenant="x", priority_class=BATCH), 20)
    run(engine, [alone], num_steps=500)
    assert alone.num_tokens > 0.9 * 500 * 8 * 15 / 10
