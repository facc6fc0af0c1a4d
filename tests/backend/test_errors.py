"""Errors keep their kind and message across processes."""

from __future__ import annotations

import pytest

from inflight import errors
from inflight.errors import (
    CapacityError,
    ConfigError,
    DeadlineError,
    EngineError,
    InflightError,
    LimitExceeded,
    NotPermitted,
    QuarantinedError,
    RequestError,
    Unauthenticated,
    UnknownModel,
    did_you_mean,
    from_kind,
)

LEAVES = [
    *(ConfigError, RequestError, QuarantinedError, CapacityError, DeadlineError, EngineError),
]
# Raised and reported by the doors; an engine never sends them.
OF_DOORS = [LimitExceeded, NotPermitted, Unauthenticated, UnknownModel]


@pytest.mark.parametrize("cls", LEAVES)
def test_an_error_survives_the_trip(cls: type[InflightError]) -> None:
    sent = cls("all of it")
    received = from_kind(sent.kind, str(sent))
    assert type(received) is cls
    assert str(received) == "all of it"


def test_every_error_but_those_of_doors_is_known_on_the_wire() -> None:
    defined = {
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, InflightError)
    }
    assert defined == {InflightError, *LEAVES, *OF_DOORS}
    assert {cls.kind for cls in LEAVES} == errors.KINDS
    kinds = [cls.kind for cls in defined]
    assert len(set(kinds)) == len(kinds)


@pytest.mark.parametrize("kind", ["internal", "", "of a later version"])
def test_an_unknown_kind_is_the_engines_fault(kind: str) -> None:
    assert type(from_kind(kind, "x")) is EngineError


def test_the_tensor_at_fault_leads_the_message() -> None:
    error = RequestError("7 is too much", "top_p")
    assert str(error) == "top_p: 7 is too much"
    assert error.param == "top_p"
    assert RequestError("too long").param is None


def test_the_param_is_named_once_after_a_round_trip() -> None:
    sent = RequestError("7 is too much", "top_p")
    assert str(from_kind(sent.kind, str(sent))) == str(sent)


def test_a_close_name_is_suggested_and_a_far_one_is_not() -> None:
    assert did_you_mean("topp", ["top_p", "seed"]) == "; did you mean 'top_p'?"
    assert did_you_mean("zzz", ["top_p", "seed"]) == ""
    assert did_you_mean("zzz", []) == ""
