"""A child that fails is replaced, ever more slowly if it fails in a row."""

from __future__ import annotations

import pytest

from inflight.errors import EngineError
from inflight.supervision.keeper import MAX_FAILURES, PAUSES_S, STABLE_S, Keeper


class FakeChild:
    name = "the child"

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.found = ""
        self.refuses = False

    def start(self) -> None:
        self.calls.append("start")
        self.found = ""
        if self.refuses:
            raise EngineError("no room")

    def problem(self) -> str:
        return self.found

    def kill(self) -> None:
        self.calls.append("kill")


class Kept:
    """A keeper on a clock of its own."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.child = FakeChild()
        self.keeper = Keeper(self.child, lambda: self.now)
        self.keeper.start()
        self.child.calls.clear()

    def fail(self) -> None:
        self.child.found = "hangs"
        self.keeper.poll()


@pytest.fixture
def kept() -> Kept:
    return Kept()


def test_a_child_that_works_is_left_alone(kept: Kept) -> None:
    for _ in range(10):
        kept.keeper.poll()
        kept.keeper.serves()
        kept.now += 60.0
    assert kept.child.calls == []
    assert kept.keeper.num_restarts == 0 and kept.keeper.problem == ""


def test_the_first_failure_is_repaired_at_once(kept: Kept) -> None:
    kept.fail()
    assert kept.child.calls == ["kill", "start"]
    assert kept.keeper.num_restarts == 1
    assert kept.keeper.problem == "hangs", "until it serves"
    kept.keeper.serves()
    assert kept.keeper.problem == ""


def test_failures_in_a_row_wait_longer_and_longer(kept: Kept) -> None:
    for pause in [*PAUSES_S, PAUSES_S[-1]]:
        kept.fail()
        if pause:
            assert kept.keeper.is_down
            kept.now += pause - 0.1
            kept.keeper.poll()
            assert kept.keeper.is_down
            kept.now += 0.2
            kept.keeper.poll()
        assert not kept.keeper.is_down
    assert kept.child.calls == ["kill", "start"] * (len(PAUSES_S) + 1)


def test_a_child_that_served_for_a_while_does_not_fail_in_a_row(kept: Kept) -> None:
    for _ in range(2 * MAX_FAILURES):
        kept.fail()
        assert not kept.keeper.is_down and not kept.keeper.is_failing
        kept.keeper.serves()
        kept.now += STABLE_S + 1.0
        kept.keeper.serves()


def test_a_child_that_keeps_failing_is_reported(kept: Kept) -> None:
    for number in range(MAX_FAILURES):
        assert not kept.keeper.is_failing, number
        kept.fail()
        kept.now += 60.0
        kept.keeper.poll()
    assert kept.keeper.is_failing


def test_a_start_that_fails_is_a_failure(kept: Kept) -> None:
    kept.child.refuses = True
    kept.fail()
    assert kept.child.calls == ["kill", "start", "kill"]
    assert kept.keeper.is_down and kept.keeper.problem == "cannot be started: no room"
    kept.child.refuses = False
    kept.now += PAUSES_S[1]
    kept.keeper.poll()
    assert kept.child.calls[-1] == "start" and not kept.keeper.is_down


def test_a_stopped_child_stays_stopped(kept: Kept) -> None:
    kept.keeper.stop()
    kept.now += 1e6
    kept.keeper.poll()
    kept.keeper.serves()
    assert kept.child.calls == ["kill"]
