"""Each wish has its bounds: the last allowed value passes, the next one is refused by name."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from inflight.errors import RequestError
from inflight.sampling import (
    MAX_BAD_WORDS,
    MAX_STOP_WORD_BYTES,
    MAX_STOP_WORDS,
    MAX_TEMPERATURE,
    MAX_TOKENS_LIMIT,
    SamplingParams,
)

TINY = math.ulp(0.0)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_tokens", [1, MAX_TOKENS_LIMIT, None]),
        ("min_tokens", [0, MAX_TOKENS_LIMIT]),
        ("temperature", [0.0, MAX_TEMPERATURE, None, 1]),
        ("top_k", [-1, 0, 1, 2**31 - 1]),
        ("top_p", [TINY, 1.0]),
        ("min_p", [0.0, math.nextafter(1.0, 0.0)]),
        ("repetition_penalty", [TINY, 10.0]),
        ("presence_penalty", [-2.0, 2.0]),
        ("frequency_penalty", [-2.0, 2.0]),
        ("seed", [0, 2**64 - 1, None]),
        ("end_id", [0, None]),
        ("stop_words", [(), ("x" * MAX_STOP_WORD_BYTES,), ("x",) * MAX_STOP_WORDS, ("é" * 128,)]),
        ("bad_words", [(), ("x" * MAX_STOP_WORD_BYTES,), ("x",) * MAX_BAD_WORDS]),
    ],
)
def test_the_whole_range_is_allowed(name: str, values: list[Any]) -> None:
    for value in values:
        assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_tokens", [0, -1, MAX_TOKENS_LIMIT + 1]),
        ("min_tokens", [-1, MAX_TOKENS_LIMIT + 1]),
        ("temperature", [-TINY, -1.0, math.nextafter(MAX_TEMPERATURE, 200)]),
        ("top_k", [-2, 2**31]),
        ("top_p", [0.0, -0.5, math.nextafter(1.0, 2.0)]),
        ("min_p", [-TINY, 1.0]),
        ("repetition_penalty", [0.0, -1.0, 10.01]),
        ("presence_penalty", [-2.01, 2.01]),
        ("frequency_penalty", [-2.01, 2.01]),
        ("seed", [-1, 2**64]),
        ("end_id", [-1]),
        ("stop_words", [("",), ("x" * 257,), ("é" * 129,), ("x",) * (MAX_STOP_WORDS + 1)]),
        ("bad_words", [("",), ("x" * 257,), ("x",) * (MAX_BAD_WORDS + 1)]),
    ],
)
def test_the_next_value_is_refused_by_name(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(RequestError, match=f"^{name}: .*allowed: "):
            SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "name",
    [
        "temperature",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    ],
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(name: str, value: float) -> None:
    with pytest.raises(RequestError, match=f"^{name}: "):
        SamplingParams(**{name: value})


def test_min_tokens_cannot_exceed_max_tokens() -> None:
    SamplingParams(min_tokens=5, max_tokens=5)
    with pytest.raises(RequestError, match=r"min_tokens: 6 is more than max_tokens \(5\)"):
        SamplingParams(min_tokens=6, max_tokens=5)


@pytest.mark.parametrize(
    ("wishes", "temperature"),
    [
        ({}, 0.0),
        ({"top_k": 1}, 0.0),
        ({"top_k": -1}, 0.0),
        ({"top_k": 2}, 1.0),
        ({"top_p": 0.9}, 1.0),
        ({"min_p": 0.1}, 1.0),
        ({"seed": 0}, 1.0),
        ({"temperature": 0.0, "top_p": 0.9, "seed": 4}, 0.0),
        ({"temperature": 0.7}, 0.7),
        ({"temperature": 1e-6}, 0.0),
        ({"temperature": 1e-5}, 1e-5),
    ],
)
def test_greedy_unless_something_asks_for_a_draw(
    wishes: dict[str, Any], temperature: float
) -> None:
    assert SamplingParams(**wishes).effective_temperature == temperature


def test_penalties_are_told() -> None:
    assert not SamplingParams().has_penalties
    for wish in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert SamplingParams(**{wish: 1.5}).has_penalties


def test_defaults_take_no_room_on_the_wire() -> None:
    assert msgspec.msgpack.encode(SamplingParams()) == msgspec.msgpack.encode({})


def test_bounds_hold_for_what_comes_off_the_wire() -> None:
    body = msgspec.msgpack.encode({"top_p": 1.5})
    with pytest.raises(RequestError, match=r"^top_p: 1\.5"):
        msgspec.msgpack.decode(body, type=SamplingParams)


@pytest.mark.parametrize("name", ["top_k", "seed", "max_tokens", "min_tokens", "end_id"])
def test_counts_off_the_wire_are_whole_numbers(name: str) -> None:
    body = msgspec.msgpack.encode({name: 1.5})
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(body, type=SamplingParams)
