"""Who may make a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Of a call: keys in lower case; values of keys that end with -bin are bytes.
Metadata = Sequence[tuple[str, str | bytes]]


@dataclass(frozen=True, slots=True)
class Tenant:
    """On whose account a call runs."""

    name: str


EVERYBODY = Tenant("everybody")


async def admit(method: str, metadata: Metadata) -> Tenant:
    """The tenant of a call, before its first message is read.

    Raises:
        Refused: nobody may make this call.
    """
    return EVERYBODY
