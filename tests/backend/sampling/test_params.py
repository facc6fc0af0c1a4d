"""Bounds of each option: the last allowed value passes, the next one is rejected by name."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from inflight.errors import RequestError
from inflight.sampling.options import MAX_STRING_BYTES
from inflight.sampling.params import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORDS,
    MAX_DRY_BREAKERS,
    MAX_LOGIT_BIASES,
    MAX_STOP_TOKENS,
    MAX_STOP_WORDS,
    MAX_TEMPERATURE,
    MAX_TOKENS_LIMIT,
    SamplingParams,
)

TINY = math.ulp(0.0)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_tokens", [-1, 0, 1, MAX_TOKENS_LIMIT, None]),
        ("min_tokens", [0, MAX_TOKENS_LIMIT]),
        ("temperature", [0.0, MAX_TEMPERATURE, None, 1]),
        ("top_k", [-1, 0, 1, 2**31 - 1]),
        ("top_p", [TINY, 1.0]),
        ("min_p", [0.0, math.nextafter(1.0, 0.0)]),
        ("typical_p", [TINY, 1.0]),
        ("top_n_sigma", [0.0, 100.0]),
        ("epsilon_cutoff", [0.0, math.nextafter(1.0, 0.0)]),
        ("xtc_threshold", [0.0, 0.5]),
        ("xtc_probability", [0.0, 1.0]),
        ("repetition_penalty", [TINY, 10.0]),
        ("presence_penalty", [-2.0, 2.0]),
        ("frequency_penalty", [-2.0, 2.0]),
        ("dry_multiplier", [0.0, 100.0]),
        ("dry_base", [1.0, 10.0]),
        ("dry_allowed_length", [1, 64]),
        ("dry_penalty_last_n", [-1, 0, MAX_TOKENS_LIMIT]),
        ("dry_sequence_breakers", [None, (), ("x" * 256,), ("x",) * MAX_DRY_BREAKERS]),
        ("no_repeat_ngram_size", [0, 2, 64]),
        ("logit_bias", [(), ((0, -100.0), (MAX_TOKENS_LIMIT, 100.0))]),
        ("logit_bias", [tuple((i, 1.0) for i in range(MAX_LOGIT_BIASES))]),
        ("allowed_token_ids", [(), (0, MAX_TOKENS_LIMIT), (7,) * MAX_ALLOWED_TOKENS]),
        ("num_logprobs", [None, 0, 20]),
        ("num_prompt_logprobs", [None, 0, 20]),
        ("seed", [0, 2**64 - 1, None]),
        ("end_id", [0, None]),
        ("stop_token_ids", [(), (0, MAX_TOKENS_LIMIT), (7,) * MAX_STOP_TOKENS]),
        ("stop_words", [(), ("x" * MAX_STRING_BYTES,), ("x",) * MAX_STOP_WORDS, ("é" * 128,)]),
        ("bad_words", [(), ("x" * MAX_STRING_BYTES,), ("x",) * MAX_BAD_WORDS]),
    ],
)
def test_the_whole_range_is_allowed(name: str, values: list[Any]) -> None:
    for value in values:
        assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_tokens", [-2, MAX_TOKENS_LIMIT + 1]),
        ("min_tokens", [-1, MAX_TOKENS_LIMIT + 1]),
        ("temperature", [-TINY, -1.0, math.nextafter(MAX_TEMPERATURE, 200)]),
        ("top_k", [-2, 2**31]),
        ("top_p", [0.0, -0.5, math.nextafter(1.0, 2.0)]),
        ("min_p", [-TINY, 1.0]),
        ("typical_p", [0.0, -0.5, math.nextafter(1.0, 2.0)]),
        ("top_n_sigma", [-TINY, 100.01]),
        ("epsilon_cutoff", [-TINY, 1.0]),
        ("xtc_threshold", [-TINY, math.nextafter(0.5, 1.0)]),
        ("xtc_probability", [-TINY, math.nextafter(1.0, 2.0)]),
        ("dry_multiplier", [-TINY, 100.01]),
        ("dry_base", [math.nextafter(1.0, 0.0), 10.01]),
        ("dry_allowed_length", [0, 65]),
        ("dry_penalty_last_n", [-2, MAX_TOKENS_LIMIT + 1]),
        ("dry_sequence_breakers", [("",), ("x" * 257,), ("x",) * (MAX_DRY_BREAKERS + 1)]),
        ("no_repeat_ngram_size", [-1, 1, 65]),
        ("logit_bias", [((0, -100.01),), ((0, 100.01),), ((-1, 1.0),), ((2**31, 1.0),)]),
        ("logit_bias", [((5, 1.0), (6, 1.0), (5, 2.0))]),
        ("logit_bias", [tuple((i, 1.0) for i in range(MAX_LOGIT_BIASES + 1))]),
        ("allowed_token_ids", [(-1,), (2**31,), (7,) * (MAX_ALLOWED_TOKENS + 1)]),
        ("num_logprobs", [-1, 21]),
        ("beam_width", [-1, 0, 17]),
        ("length_penalty", [-10.01, 10.01]),
        ("num_prompt_logprobs", [-1, 21]),
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
        "typical_p",
        "top_n_sigma",
        "epsilon_cutoff",
        "xtc_threshold",
        "xtc_probability",
        "dry_multiplier",
        "dry_base",
        "length_penalty",
    ],
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_values_are_rejected(name: str, value: float) -> None:
    with pytest.raises(RequestError, match=f"^{name}: "):
        SamplingParams(**{name: value})


def test_a_bias_that_is_not_finite_is_refused() -> None:
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(RequestError, match=r"^logit_bias: "):
            SamplingParams(logit_bias=((1, value),))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (
            {"temperature": 0.7, "top_p": 0.5},
            "temperature: requests random sampling, .* beam_width 4",
        ),
        ({"top_k": 5}, "top_k: requests random sampling"),
        ({"top_p": 0.5}, "top_p: requests random sampling"),
        ({"min_p": 0.5}, "min_p: requests random sampling"),
        ({"typical_p": 0.5}, "typical_p: requests random sampling"),
        ({"top_n_sigma": 1.0}, "top_n_sigma: requests random sampling"),
        ({"epsilon_cutoff": 0.1}, "epsilon_cutoff: requests random sampling"),
        ({"xtc_probability": 0.5}, "xtc_probability: requests random sampling"),
        ({"seed": 5}, "seed: requests random sampling"),
        ({"repetition_penalty": 1.1}, "repetition_penalty: cannot be combined with beam_width 4"),
        ({"presence_penalty": 1.0}, "presence_penalty: cannot be combined"),
        ({"frequency_penalty": 1.0}, "frequency_penalty: cannot be combined"),
        ({"logit_bias": ((1, 1.0),)}, "logit_bias: cannot be combined"),
        ({"dry_multiplier": 1.0}, "dry_multiplier: cannot be combined"),
        ({"allowed_token_ids": (1,)}, "allowed_token_ids: cannot be combined"),
        ({"num_prompt_logprobs": 0}, "num_prompt_logprobs: cannot be combined with beam_width 4"),
        ({"max_tokens": 0}, "beam_width: cannot be combined with max_tokens 0"),
    ],
)
def test_options_incompatible_with_beam_search_are_rejected_by_name(
    options: dict[str, Any], named: str
) -> None:
    SamplingParams(**options)
    SamplingParams(**options, beam_width=1, length_penalty=2.0, early_stopping=True)
    with pytest.raises(RequestError, match=f"^{named}"):
        SamplingParams(**options, beam_width=4)


def test_bans_and_greedy_can_be_combined_with_beam_search() -> None:
    options = {"min_tokens": 3, "bad_words": ("x",), "no_repeat_ngram_size": 2}
    SamplingParams(beam_width=4, temperature=0.0, top_p=0.9, seed=5, num_logprobs=3, **options)


@pytest.mark.parametrize("options", [{"typical_p": 0.9}, {"xtc_probability": 0.1}])
@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_filters_that_may_remove_the_top_token_cannot_be_combined_with_greedy(
    options: dict[str, Any], temperature: float
) -> None:
    (name,) = options
    with pytest.raises(RequestError, match=f"^{name}: may drop the most probable token, which"):
        SamplingParams(temperature=temperature, **options)
    SamplingParams(temperature=1e-5, **options)
    SamplingParams(temperature=0.0, top_n_sigma=1.0, xtc_threshold=0.1)


@pytest.mark.parametrize(
    "options",
    [{"end_id": 100}, {"logit_bias": ((3, 1.0), (100, 1.0))}, {"allowed_token_ids": (3, 100)}],
)
def test_ids_are_held_against_a_vocabulary(options: dict[str, Any]) -> None:
    (name,) = options
    params = SamplingParams(**options)
    params.check_vocabulary(101)
    message = rf"^{name}: 100 is not in the vocabulary; allowed: 0 to 99$"
    with pytest.raises(RequestError, match=message):
        params.check_vocabulary(100)


def test_min_tokens_cannot_exceed_max_tokens() -> None:
    SamplingParams(min_tokens=5, max_tokens=5)
    SamplingParams(min_tokens=5, max_tokens=-1)
    with pytest.raises(RequestError, match=r"min_tokens: 6 is more than max_tokens \(5\)"):
        SamplingParams(min_tokens=6, max_tokens=5)


@pytest.mark.parametrize(
    ("options", "temperature"),
    [
        ({}, 0.0),
        ({"top_k": 1}, 0.0),
        ({"top_k": -1}, 0.0),
        ({"top_k": 2}, 1.0),
        ({"top_p": 0.9}, 1.0),
        ({"min_p": 0.1}, 1.0),
        ({"seed": 0}, 1.0),
        ({"typical_p": 0.9}, 1.0),
        ({"top_n_sigma": 1.0}, 1.0),
        ({"epsilon_cutoff": 0.01}, 1.0),
        ({"xtc_probability": 0.5}, 1.0),
        ({"xtc_threshold": 0.3}, 0.0),
        ({"dry_multiplier": 1.0, "no_repeat_ngram_size": 2, "logit_bias": ((1, 1.0),)}, 0.0),
        ({"temperature": 0.0, "top_n_sigma": 1.0}, 0.0),
        ({"temperature": 0.0, "epsilon_cutoff": 0.1}, 0.0),
        ({"temperature": 0.0, "top_p": 0.9, "seed": 4}, 0.0),
        ({"temperature": 0.7}, 0.7),
        ({"temperature": 1e-6}, 0.0),
        ({"temperature": 1e-5}, 1e-5),
    ],
)
def test_greedy_unless_something_asks_for_a_draw(
    options: dict[str, Any], temperature: float
) -> None:
    assert SamplingParams(**options).effective_temperature == temperature


def test_penalties_are_forwarded() -> None:
    assert not SamplingParams().has_penalties
    for options in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert SamplingParams(**{options: 1.5}).has_penalties


def test_filters_are_forwarded() -> None:
    assert not SamplingParams(temperature=1.0, top_k=-1, xtc_threshold=0.2).has_filters
    for options in ({"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}):
        assert SamplingParams(**options).has_filters
        assert not SamplingParams(**options).has_rare_filters
    for options in (
        {"typical_p": 0.9},
        {"top_n_sigma": 2.0},
        {"epsilon_cutoff": 0.01},
        {"xtc_probability": 0.1},
    ):
        assert SamplingParams(**options).has_filters
        assert SamplingParams(**options).has_rare_filters


def test_defaults_are_omitted_on_the_wire() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(SamplingParams())) == {}


def test_bounds_hold_for_what_comes_off_the_wire() -> None:
    body = msgspec.msgpack.encode({"top_p": 1.5})
    with pytest.raises(RequestError, match=r"^top_p: 1\.5"):
        msgspec.msgpack.decode(body, type=SamplingParams)


def test_every_sampling_param_round_trips_through_the_wire() -> None:
    params = SamplingParams(
        typical_p=0.9,
        top_n_sigma=1.5,
        epsilon_cutoff=0.01,
        xtc_threshold=0.2,
        xtc_probability=0.5,
        dry_multiplier=0.8,
        dry_sequence_breakers=("x", "é"),
        no_repeat_ngram_size=3,
        logit_bias=((5, -1.5), (2, 3.0)),
        allowed_token_ids=(1, 2),
        num_logprobs=0,
    )
    body = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(body, type=SamplingParams) == params


@pytest.mark.parametrize("name", ["top_k", "seed", "max_tokens", "min_tokens", "end_id"])
def test_counts_off_the_wire_are_whole_numbers(name: str) -> None:
    body = msgspec.msgpack.encode({name: 1.5})
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(body, type=SamplingParams)
