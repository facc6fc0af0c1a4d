"""Why a request is not admitted: errors that each door maps to a status of its protocol."""

from __future__ import annotations

from inflight.errors import CapacityError, InflightError

REALM = "inflight"


class Unauthenticated(InflightError):
    """No valid key: 401, UNAUTHENTICATED. The text does not tell an unknown key from an expired
    one; the audit log does.

    Args:
        reason: for the audit log.
    """

    kind = "unauthenticated"

    def __init__(self, reason: str) -> None:
        super().__init__(
            "Authorization: no valid API key; allowed: `Bearer KEY`, or `X-Api-Key: KEY`, once"
        )
        self.reason = reason


class NotPermitted(InflightError):
    """The key's role does not suffice: 403, PERMISSION_DENIED."""

    kind = "not_permitted"


class UnknownModel(InflightError):
    """A model that the key does not allow, whether or not it exists: 404, NOT_FOUND."""

    kind = "unknown_model"


class LimitExceeded(CapacityError):
    """A limit of the key: 429 with Retry-After, RESOURCE_EXHAUSTED.

    Args:
        limit: its name in the keys file.
        value: what it allows.
        retry_after_s: seconds, at least 1.
    """

    kind = "limit"

    def __init__(self, limit: str, value: int, retry_after_s: int) -> None:
        super().__init__(
            f"{limit}: the key has reached its limit of {value}; retry in {retry_after_s} s"
        )
        self.limit = limit
        self.retry_after_s = retry_after_s
