"""A request belongs to the peer that has submitted it, until it ends."""

import pytest

from inflight.core.request import FinishReason, TokenEvent
from inflight.errors import EngineError
from inflight.ipc.request_owners import RequestOwners


@pytest.fixture
def owners() -> RequestOwners[str]:
    found: RequestOwners[str] = RequestOwners()
    found.add("first", [5])
    found.add("second", [9, 9, 7, 8])
    return found


def test_a_request_is_found_until_its_output_ends(owners: RequestOwners[str]) -> None:
    assert [owners.find(one) for one in (5, 7, 9, 6)] == ["first", "second", "second", None]
    owners.ended(TokenEvent(5, finish_reason=FinishReason.STOP))
    owners.ended(TokenEvent(7, finish_reason=FinishReason.STOP))
    assert [owners.find(one) for one in (5, 7, 9)] == [None, None, "second"]
    owners.ended(TokenEvent(5, finish_reason=FinishReason.STOP))


def test_an_error_ends_all_outputs_of_its_request(owners: RequestOwners[str]) -> None:
    owners.ended(TokenEvent.failed(9, EngineError("broken")))
    assert owners.requests_of("second") == []
    assert owners.requests_of("first") == [5]


def test_an_id_in_use_stays_its_owners(owners: RequestOwners[str]) -> None:
    with pytest.raises(EngineError, match="the request id is in use"):
        owners.add("third", [6, 5])
    assert [owners.find(one) for one in (5, 6)] == ["first", None]
    owners.ended(TokenEvent(5, finish_reason=FinishReason.STOP))
    owners.add("third", [6, 5])
    assert owners.requests_of("third") == [6, 5]
