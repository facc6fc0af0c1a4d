"""A disconnected consumer is detected within a few steps; a slow one is not mistaken for one."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.engine import delivery
from inflight.engine.delivery import DeliveryWatch

STEP = 0.015


class Pipeline:
    """An engine's loop, and a way to the consumers and back which takes `latency(now)` seconds.

    The loop reads what has arrived, asks who is overdue, then steps. Responses stay in order per
    request. `blocked_until` holds everything back; what then arrives is coalesced: one
    acknowledgement for the last of it.
    """

    def __init__(self, num_streams: int, latency: Callable[[float], float]) -> None:
        self.watch = DeliveryWatch()
        self.latency = latency
        self.now = 100.0
        self.position = dict.fromkeys(range(num_streams), 0)
        self.suspended: dict[int, float] = {}
        self.cancelled: set[int] = set()
        self.abandoned: list[int] = []
        self.num_suspensions = 0
        self.blocked_until = 0.0
        self._under_way: list[tuple[float, int, int]] = []
        self._last_arrival: dict[int, float] = {}

    def step(self, duration: float = STEP) -> None:
        self._read()
        self._sweep()
        self.now += duration
        self.watch.record_step(duration)
        for stream in list(self.position):
            if stream in self.suspended:
                continue
            self.position[stream] += 1
            self.watch.emitted(stream, self.position[stream], self.now)
            if stream not in self.cancelled:
                arrival = max(
                    self.now + self.latency(self.now),
                    self._last_arrival.get(stream, 0.0),
                    self.blocked_until,
                )
                self._last_arrival[stream] = arrival
                heapq.heappush(self._under_way, (arrival, stream, self.position[stream]))

    def _sweep(self) -> None:
        for stream in self.watch.overdue(self.now):
            self.suspended[stream] = self.now
            self.num_suspensions += 1
        for stream in self.watch.abandoned(self.now):
            self.abandoned.append(stream)
            del self.position[stream]

    def _read(self) -> None:
        arrived: dict[int, int] = {}
        while self._under_way and self._under_way[0][0] <= self.now:
            _, stream, position = heapq.heappop(self._under_way)
            arrived[stream] = position
        for stream, position in arrived.items():
            if self.watch.delivered(stream, position, self.now):
                del self.suspended[stream]

    def steps(self, count: int, duration: float = STEP) -> None:
        for _ in range(count):
            self.step(duration)


@pytest.mark.parametrize("num_streams", [1, 2, 64])
def test_a_disconnected_consumer_costs_two_steps_after_the_first_lost_response(
    num_streams: int,
) -> None:
    line = Pipeline(num_streams, lambda now: 0.001)
    line.steps(100)
    line.cancelled.add(0)
    line.steps(4)
    assert list(line.suspended) == [0]
    assert line.position[0] == 103


def test_with_very_short_steps_the_floor_counts() -> None:
    line = Pipeline(1, lambda now: 0.0005)
    line.steps(1000, duration=0.001)
    line.cancelled.add(0)
    line.steps(19, duration=0.001)
    assert not line.suspended
    line.steps(4, duration=0.001)
    assert list(line.suspended) == [0]


@pytest.mark.parametrize("num_streams", [1, 2, 64])
@pytest.mark.parametrize("latency", [0.0, 0.01, 0.1, 0.4])
def test_a_constant_latency_never_triggers_suspicion(num_streams: int, latency: float) -> None:
    line = Pipeline(num_streams, lambda now: latency)
    line.steps(200)
    assert line.num_suspensions == 0


def test_growing_latency_never_triggers_suspicion() -> None:
    """Load builds up: each response takes a little longer than the one before."""
    line = Pipeline(8, lambda now: 0.001 + 0.05 * (now - 100.0))
    line.steps(600)
    assert line.num_suspensions == 0


def test_uneven_latency_disturbs_few() -> None:
    """Heavy-tailed delays: a mean of 5 ms, once in fifty 60 ms."""
    noise = random.Random(7)
    line = Pipeline(16, lambda now: 0.06 if noise.random() < 0.02 else noise.expovariate(1 / 0.004))
    line.steps(1000)
    assert line.num_suspensions <= 3
    assert not line.abandoned


@pytest.mark.parametrize("num_streams", [1, 4])
def test_long_steps_never_trigger_suspicion(num_streams: int) -> None:
    """A step with a big prompt in it takes twenty times as long."""
    line = Pipeline(num_streams, lambda now: 0.002)
    line.steps(20)
    for _ in range(20):
        line.step(0.3)
        line.steps(5)
    assert line.num_suspensions == 0


@pytest.mark.parametrize("pause", [0.05, 0.1])
def test_a_short_pause_of_the_way_is_not_taken_for_many_lost_consumers(pause: float) -> None:
    line = Pipeline(8, lambda now: 0.002)
    line.steps(100)
    line.blocked_until = line.now + pause
    line.steps(100)
    assert line.num_suspensions == 0


@pytest.mark.parametrize("pause", [0.5, 2.0])
def test_all_come_back_after_a_long_pause_of_the_way(pause: float) -> None:
    line = Pipeline(8, lambda now: 0.002)
    line.steps(100)
    line.blocked_until = line.now + pause
    line.steps(int(pause / STEP) + 5)
    assert line.num_suspensions == 8
    assert not line.suspended
    assert not line.abandoned


def test_simultaneous_disconnects_are_detected_after_a_stall() -> None:
    line = Pipeline(8, lambda now: 0.002)
    line.steps(100)
    line.cancelled.update(range(8))
    line.steps(int(delivery.STALL_GRACE / STEP))
    assert not line.suspended
    line.steps(10)
    assert len(line.suspended) == 8


def test_the_first_response_has_time() -> None:
    watch = DeliveryWatch()
    watch.emitted(1, 1, 0.0)
    assert watch.overdue(delivery.GRACE) == []
    assert watch.overdue(delivery.GRACE + 0.001) == [1]


def test_the_delay_of_a_first_response_does_not_affect_later_estimates() -> None:
    watch = DeliveryWatch()
    watch.emitted(1, 1, 0.0)
    watch.delivered(1, 1, 0.001)
    watch.emitted(2, 1, 0.0)
    watch.delivered(2, 1, 0.9)
    assert watch.patience == delivery.MIN_PATIENCE


def test_a_late_acknowledgement_brings_a_request_back() -> None:
    watch = DeliveryWatch()
    watch.emitted(1, 1, 0.0)
    watch.delivered(1, 1, 0.001)
    watch.emitted(1, 2, 0.010)
    assert watch.overdue(0.050) == [1]
    assert watch.overdue(0.060) == [], "reported once"
    assert watch.delivered(1, 2, 0.100)
    assert not watch.delivered(1, 2, 0.101), "a repetition is no news"
    assert watch.abandoned(100.0) == []
    assert (watch.num_suspicions, watch.num_returns) == (1, 1)


def test_a_repeated_acknowledgement_is_no_sign_of_life() -> None:
    watch = DeliveryWatch()
    watch.emitted(1, 1, 0.0)
    watch.delivered(1, 1, 0.001)
    watch.emitted(1, 2, 0.010)
    assert watch.overdue(0.050) == [1]
    assert not watch.delivered(1, 1, 0.060)
    assert watch.abandoned(6.0) == [1]


def test_responses_in_flight_are_not_suspected_right_after_a_resume() -> None:
    watch = DeliveryWatch()
    watch.emitted(1, 1, 0.0)
    watch.delivered(1, 1, 0.001)
    watch.emitted(1, 2, 0.010)
    watch.emitted(1, 3, 0.011)
    assert watch.overdue(0.050) == [1]
    assert watch.delivered(1, 2, 0.060)
    assert watch.overdue(0.070) == []


def test_patience_doubles_after_a_false_suspicion() -> None:
    watch = DeliveryWatch()
    waits = []
    now = 0.0
    watch.emitted(1, 1, now)
    watch.delivered(1, 1, now)
    for position in range(2, 6):
        now += 10.0
        watch.emitted(1, position, now)
        emitted_at = now
        usual = watch.patience
        while not watch.overdue(now):
            now += 0.001
        waits.append((now - emitted_at) / usual)
        assert watch.delivered(1, position, now)
        for _ in range(100):  # others are fast, so the usual patience is small again
            now += 0.1
            watch.emitted(2, int(now * 1000), now)
            watch.delivered(2, int(now * 1000), now)
    assert waits == pytest.approx([1, 2, 4, 8], rel=0.1)


def test_an_acknowledgement_covers_all_before_it() -> None:
    """Coalesced responses: three emissions travel in one."""
    watch = DeliveryWatch()
    for position in (1, 2, 3):
        watch.emitted(1, position, 0.001 * position)
    watch.delivered(1, 3, 0.005)
    assert watch.overdue(100.0) == []


def test_an_old_acknowledgement_does_not_cover_what_follows() -> None:
    watch = DeliveryWatch()
    watch.emitted(1, 1, 0.0)
    watch.emitted(1, 2, 0.001)
    watch.delivered(1, 1, 0.002)
    assert watch.overdue(0.100) == [1]


def test_lasting_silence_ends_a_request_once() -> None:
    watch = DeliveryWatch(give_up_after=3.0)
    watch.emitted(1, 1, 0.0)
    assert watch.overdue(2.0) == [1]
    assert watch.abandoned(5.0) == []
    assert watch.abandoned(5.1) == [1]
    assert watch.abandoned(9.0) == []
    assert not watch.delivered(1, 1, 9.1), "too late"


def test_a_sibling_does_not_wait_for_a_finished_request() -> None:
    watch = DeliveryWatch()
    watch.emitted(1, 1, 0.0)
    watch.finished(1)
    watch.finished(1)
    assert watch.overdue(100.0) == []
    assert not watch.delivered(1, 1, 100.0)


def test_a_request_without_emissions_is_not_suspected() -> None:
    watch = DeliveryWatch()
    watch.emitted(1, 1, 0.0)
    watch.delivered(1, 1, 0.001)
    assert watch.overdue(1000.0) == []


def test_memory_per_request_is_bounded_and_the_oldest_is_kept() -> None:
    watch = DeliveryWatch()
    for position in range(1, 10_000):
        watch.emitted(1, position, position * 1e-5)
    assert len(watch._streams[1].pending) == delivery.MAX_PENDING
    assert watch.overdue(1e-5 + delivery.GRACE + 0.001) == [1]
    assert watch.delivered(1, 9_999, 2.0)
    assert watch.overdue(100.0) == []


def test_a_lost_consumer_ends_and_the_others_go_on() -> None:
    line = Pipeline(4, lambda now: 0.003)
    line.steps(50)
    line.cancelled.add(2)
    line.steps(int(6 / STEP))
    assert line.abandoned == [2]
    assert line.num_suspensions == 1
    assert sorted(line.position) == [0, 1, 3]


@settings(max_examples=100, deadline=None)
@given(data=st.data(), num_streams=st.integers(1, 4))
def test_replies_within_the_floor_never_trigger_suspicion(
    data: st.DataObject, num_streams: int
) -> None:
    """Any order, any coalescing, any step time: a delay below the floor is always borne."""
    watch = DeliveryWatch()
    now = 0.0
    due: list[tuple[float, int, int]] = []
    for position in range(1, data.draw(st.integers(2, 25))):
        duration = data.draw(st.floats(0.0001, 0.5))
        now += duration
        for arrival, stream, last in sorted(due):
            if arrival <= now:
                assert not watch.delivered(stream, last, arrival)
                due.remove((arrival, stream, last))
        watch.record_step(duration)
        for stream in range(num_streams):
            watch.emitted(stream, position, now)
            due.append((now + data.draw(st.floats(0, delivery.MIN_PATIENCE)), stream, position))
        assert watch.overdue(now) == []


@settings(max_examples=100, deadline=None)
@given(
    latencies=st.lists(st.floats(0.0, 2.0), min_size=1, max_size=20),
    silent_at=st.integers(0, 20),
)
def test_silence_always_ends_in_cancellation(latencies: list[float], silent_at: int) -> None:
    """A request that stays silent is cancelled, whatever was observed before."""
    watch = DeliveryWatch()
    now = 0.0
    for position, latency in enumerate(latencies, start=1):
        watch.emitted(1, position, now)
        now += latency
        watch.overdue(now)
        if position - 1 < silent_at:
            watch.delivered(1, position, now)
    watch.emitted(1, len(latencies) + 1, now)
    now += max(watch.patience, delivery.GRACE) * 2**delivery.MAX_DOUBLINGS + 0.001
    watch.overdue(now)
    now += delivery.GIVE_UP_AFTER + 0.001
    assert watch.abandoned(now) == [1]
