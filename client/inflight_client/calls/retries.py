"""When a failed request is sent again."""

from __future__ import annotations

import random
import time

from inflight_client.errors import ClientError, ConnectionFailed, InvalidRequest, Unavailable

DEFAULT_RETRIES = 2
_MAX_RETRIES = 100
FIRST_DELAY_S = 0.5
_MAX_DELAY_S = 8.0
# Delays are shortened by up to this fraction, so that clients which failed together spread out.
_JITTER = 0.25
# A server that asks for a longer wait is not waited for.
_MAX_RETRY_AFTER_S = 60.0


class Retries:
    """The attempts of one request, within its deadline. The back-off is exponential with jitter.

    Args:
        max_retries: attempts after the first one.
        timeout: seconds for all attempts together, from `start`; None for no limit.
    """

    def __init__(self, max_retries: int, timeout: float | None) -> None:
        self._max_retries = max_retries
        self._timeout = timeout
        self._deadline: float | None = None
        self._num_failed = 0

    def start(self) -> None:
        """The timeout begins. Idempotent."""
        if self._timeout is not None and self._deadline is None:
            self._deadline = time.monotonic() + self._timeout

    def remaining(self) -> float | None:
        """Seconds for the next attempt, at least 0; None for no limit."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def delay(self, error: ClientError) -> float | None:
        """Seconds to wait before the next attempt; None if there is none."""
        if not isinstance(error, Unavailable | ConnectionFailed):
            return None
        if self._num_failed == self._max_retries:
            return None
        delay = min(_MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** min(self._num_failed, 10))
        delay *= 1.0 - _JITTER * random.random()
        if isinstance(error, Unavailable) and error.retry_after is not None:
            if error.retry_after > _MAX_RETRY_AFTER_S:
                return None
            delay = max(delay, error.retry_after)
        remaining = self.remaining()
        if remaining is not None and delay >= remaining:
            return None
        self._num_failed += 1
        return delay


def checked_retries(max_retries: int) -> int:
    """`max_retries`.

    Raises:
        InvalidRequest: it is not a number of retries.
    """
    if (
        isinstance(max_retries, bool)
        or not isinstance(max_retries, int)
        or not 0 <= max_retries <= _MAX_RETRIES
    ):
        raise InvalidRequest(f"max_retries: is {max_retries!r}; allowed: 0 to {_MAX_RETRIES}")
    return max_retries
