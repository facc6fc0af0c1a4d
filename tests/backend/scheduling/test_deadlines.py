"""Deadlines are found missed in their order, once, and forgotten in time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inflight.scheduling.deadlines import Deadlines


def test_missed_ones_come_once_and_the_earliest_first() -> None:
    deadlines = Deadlines()
    deadlines.add(1, 3.0)
    deadlines.add(2, 1.0)
    deadlines.add(3, 2.0)
    assert deadlines.pop_missed(0.9) == []
    assert deadlines.pop_missed(2.0) == [2, 3]
    assert deadlines.pop_missed(2.0) == []
    assert deadlines.pop_missed(9.0) == [1]
    assert len(deadlines) == 0


@given(st.lists(st.tuples(st.integers(0, 20), st.booleans()), max_size=40), st.integers(0, 20))
def test_removed_ones_are_never_missed(entries: list[tuple[int, bool]], now: int) -> None:
    deadlines = Deadlines()
    for request_id, (deadline, _) in enumerate(entries):
        deadlines.add(request_id, float(deadline))
    for request_id, (_, is_removed) in enumerate(entries):
        if is_removed:
            deadlines.remove(request_id)
            deadlines.remove(request_id)
    expected = [
        (deadline, request_id)
        for request_id, (deadline, is_removed) in enumerate(entries)
        if deadline <= now and not is_removed
    ]
    assert deadlines.pop_missed(float(now)) == [request_id for _, request_id in sorted(expected)]


def test_requests_that_end_early_take_no_memory() -> None:
    deadlines = Deadlines()
    for request_id in range(10_000):
        deadlines.add(request_id, 1e6)
        deadlines.remove(request_id)
    assert len(deadlines._heap) <= 65
