"""The loop does not sleep while an answer is near, and always sleeps afterwards."""

from __future__ import annotations

import asyncio
import time

import pytest
import uvloop

from inflight.door.http import busy_poll
from inflight.door.http.busy_poll import BusyPoll


def processor_share(poll: BusyPoll, num_requests: int, seconds: float) -> float:
    """The share of this time that the loop's thread computes, with so many requests in flight."""

    async def run() -> float:
        held = [poll.awaiting() for _ in range(num_requests)]
        for request in held:
            request.__enter__()
        started, computed = time.monotonic(), time.thread_time()
        await asyncio.sleep(seconds)
        share = (time.thread_time() - computed) / (time.monotonic() - started)
        for request in held:
            request.__exit__(None, None, None)
        return share

    return uvloop.run(run())


@pytest.mark.alone
def test_the_loop_polls_for_its_time_and_no_longer() -> None:
    assert processor_share(BusyPoll(0.2), 1, 0.15) > 0.4
    assert 0.1 < processor_share(BusyPoll(0.2), 1, 0.8) < 0.3


@pytest.mark.alone
@pytest.mark.parametrize(("seconds", "num_requests"), [(0.0, 1), (0.2, 0), (0.2, 17)])
def test_the_loop_sleeps(seconds: float, num_requests: int) -> None:
    """By setting, without a request, and with so many that they keep it awake."""
    assert processor_share(BusyPoll(seconds), num_requests, 0.15) < 0.1


def test_a_later_request_is_polled_for_as_well() -> None:
    poll = BusyPoll(0.05)

    async def run() -> list[int]:
        turns = []
        for _ in range(2):
            with poll.awaiting():
                started, count = time.monotonic(), 0
                while time.monotonic() - started < 0.01:
                    await asyncio.sleep(0)
                    count += poll._is_polling
            turns.append(count)
            await asyncio.sleep(0.01)
            assert not poll._is_polling
        return turns

    assert all(uvloop.run(run()))


@pytest.mark.parametrize(("cores", "seconds"), [(2, 0.0), (7, 0.0), (8, 0.02), (32, 0.02)])
def test_small_machines_do_not_poll(
    monkeypatch: pytest.MonkeyPatch, cores: int, seconds: float
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))
    assert busy_poll.default_s() == seconds
