"""Windows of rate limits end by the monotonic clock alone."""

from __future__ import annotations

import asyncio
import time

import pytest
from limits import RateLimitItemPerMinute
from limits.aio.strategies import FixedWindowRateLimiter

from inflight.access.accounts import WindowStorage

LIMIT = RateLimitItemPerMinute(2)
HOUR_S = 3600.0


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_window_begins_with_its_first_request_and_lasts_a_minute() -> None:
    async def run() -> None:
        clock = Clock()
        limiter = FixedWindowRateLimiter(WindowStorage(clock))
        clock.now += 30
        assert [await limiter.hit(LIMIT, "a") for _ in range(3)] == [True, True, False]
        assert await limiter.get_window_stats(LIMIT, "a") == (1090.0, 0)
        assert await limiter.test(LIMIT, "b"), "another one has its own"
        clock.now += 59.9
        assert not await limiter.test(LIMIT, "a")
        clock.now += 0.1
        assert await limiter.test(LIMIT, "a")
        assert await limiter.get_window_stats(LIMIT, "a") == (clock.now, 2)
        assert await limiter.hit(LIMIT, "a", cost=2)
        assert not await limiter.hit(LIMIT, "a")

    asyncio.run(run())


@pytest.mark.parametrize("jump_s", [-HOUR_S, HOUR_S])
def test_a_jump_of_the_wall_clock_changes_no_window(
    monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    async def run() -> None:
        clock = Clock()
        limiter = FixedWindowRateLimiter(WindowStorage(clock))
        assert await limiter.hit(LIMIT, "a", cost=2)
        before = time.time()
        monkeypatch.setattr(time, "time", lambda: before + jump_s)
        assert not await limiter.test(LIMIT, "a")
        clock.now += 60
        assert await limiter.test(LIMIT, "a")

    asyncio.run(run())
