"""Which peer of an engine has submitted each request in flight: random ids do not tell."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from inflight.core.request import TokenEvent
from inflight.errors import EngineError

Peer = TypeVar("Peer")


class RequestOwners(Generic[Peer]):
    """The peers by request id. One thread changes it, any thread may call `find`."""

    def __init__(self) -> None:
        # With all ids of the request: an error of a beam search ends all of its outputs.
        self._owners: dict[int, tuple[Peer, tuple[int, ...]]] = {}

    def add(self, owner: Peer, request_ids: Iterable[int]) -> None:
        """Remember whose request it is.

        Args:
            request_ids: of one request, which are several for a beam search.

        Raises:
            EngineError: one of them is in use; none is added.
        """
        ids = tuple(dict.fromkeys(request_ids))
        if any(one in self._owners for one in ids):
            raise EngineError("the request id is in use; send the request again with another one")
        self._owners.update(dict.fromkeys(ids, (owner, ids)))

    def find(self, request_id: int) -> Peer | None:
        """The peer that has submitted a request; None if it is not in flight."""
        found = self._owners.get(request_id)
        return None if found is None else found[0]

    def ended(self, event: TokenEvent) -> None:
        """Forget what ends with an event: an output, or with an error all of the request."""
        found = self._owners.pop(event.request_id, None)
        if found is not None and event.error is not None:
            for request_id in found[1]:
                self._owners.pop(request_id, None)

    def requests_of(self, owner: Peer) -> list[int]:
        """The ids of a peer's requests."""
        return [request_id for request_id, (one, _) in list(self._owners.items()) if one is owner]
