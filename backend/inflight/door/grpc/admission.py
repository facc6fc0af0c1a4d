"""Admission: whether a call may be made, and for which tenant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Of a call: keys in lower case; values of keys that end with -bin are bytes.
Metadata = Sequence[tuple[str, str | bytes]]


@dataclass(frozen=True, slots=True)
class Tenant:
    """The account of a call."""

    name: str


DEFAULT = Tenant("default")


async def admit(method: str, metadata: Metadata) -> Tenant:
    """The tenant of a call, before its first message is read.

    Raises:
        Refused: the call is not admitted.
    """
    return DEFAULT
