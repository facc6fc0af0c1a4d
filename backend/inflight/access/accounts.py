"""What each account has used of its limits.

Requests and tokens are counted in fixed windows of one minute, which need one counter per key and
window, whatever the limit; around the end of a window, up to twice the limit can pass within a
minute. Tokens are known when an output has ended: a request is refused if its window has no token
left, and one that was admitted runs to its end.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable

from limits import RateLimitItem, RateLimitItemPerMinute
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import FixedWindowRateLimiter

from inflight.access.key import NO_LIMITS, KeyLimits
from inflight.access.ledger import Ledger
from inflight.access.messages import Verdict
from inflight.access.tenant_metrics import TenantMetrics
from inflight.ipc.metrics.usage import Usage, tenant_of

REQUESTS, TOKENS, CONCURRENT = "requests_per_minute", "tokens_per_minute", "concurrent_requests"
ALLOWED = Verdict()
# Of a request that waits for another one to end.
CONCURRENT_RETRY_S = 1


class WindowStorage(MemoryStorage):
    """The in-memory storage of `limits`, with windows on the monotonic clock. The original uses the
    wall clock: set back by an hour, it would keep a window open for that hour.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock

    async def incr(self, key: str, expiry: float, amount: int = 1) -> int:
        """Add to a counter; its window of `expiry` seconds begins with the first addition."""
        if await self.get(key) == 0:
            self.expirations[key] = self._clock() + expiry
        self.storage[key] += amount
        return self.storage[key]

    async def get(self, key: str) -> int:
        """The counter in its current window; 0 outside of one."""
        if self.expirations.get(key, 0.0) <= self._clock():
            self.storage.pop(key, None)
            self.expirations.pop(key, None)
        return self.storage.get(key, 0)

    async def get_expiry(self, key: str) -> float:
        """When its window ends, by the clock; now if there is none."""
        return self.expirations.get(key, self._clock())


class Accounts:
    """Counts requests and tokens, and says which requests exceed a limit.

    Args:
        ledger: records all of it.

    Attributes:
        metrics: the same since the start, by tenant.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.metrics = TenantMetrics()
        self._ledger = ledger
        self._limiter = FixedWindowRateLimiter(WindowStorage())
        self._limits: dict[str, KeyLimits] = {}
        self._in_flight: Counter[str] = Counter()
        self._lock = asyncio.Lock()  # between a check and what it counts

    def num_in_flight(self, account: str) -> int:
        return self._in_flight[account]

    async def begin(self, account: str, limits: KeyLimits) -> Verdict:
        """Admit a request, or say which limit it exceeds; `end` belongs to each admitted one."""
        self._limits[account] = limits
        async with self._lock:
            verdict = await self._check(account, limits)
            if verdict.limit:
                self._ledger.add(account, refused=1)
                self.metrics.refused(tenant_of(account), verdict.limit)
            else:
                self._in_flight[account] += 1
                self._ledger.add(account, requests=1)
                self.metrics.admitted(tenant_of(account))
        return verdict

    def end(self, account: str, count: int = 1) -> None:
        """Requests have ended."""
        self._in_flight[account] -= count
        if self._in_flight[account] <= 0:
            del self._in_flight[account]

    async def used(self, usage: Usage) -> None:
        """Charge tokens."""
        prompt, generated = usage.num_prompt_tokens, usage.num_output_tokens
        self._ledger.add(usage.account, prompt_tokens=prompt, generated_tokens=generated)
        self.metrics.used(tenant_of(usage.account), prompt, generated)
        bound = self._limits.get(usage.account, NO_LIMITS).tokens_per_minute
        if bound is not None:
            # Counted even where it exceeds the limit: the strategy only returns that it does.
            window = RateLimitItemPerMinute(bound)
            await self._limiter.hit(window, TOKENS, usage.account, cost=prompt + generated)

    async def _check(self, account: str, limits: KeyLimits) -> Verdict:
        concurrent = limits.concurrent_requests
        if concurrent is not None and self._in_flight[account] >= concurrent:
            return Verdict(CONCURRENT, concurrent, CONCURRENT_RETRY_S)
        if (tokens := limits.tokens_per_minute) is not None:
            window = RateLimitItemPerMinute(tokens)
            if not await self._limiter.test(window, TOKENS, account):
                return await self._exceeded(TOKENS, window, account)
        if (requests := limits.requests_per_minute) is not None:
            window = RateLimitItemPerMinute(requests)
            if not await self._limiter.hit(window, REQUESTS, account):
                return await self._exceeded(REQUESTS, window, account)
        return ALLOWED

    async def _exceeded(self, limit: str, window: RateLimitItem, account: str) -> Verdict:
        reset_at, _ = await self._limiter.get_window_stats(window, limit, account)
        return Verdict(limit, window.amount, max(1, math.ceil(reset_at - time.monotonic())))
