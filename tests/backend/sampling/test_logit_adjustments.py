"""Logit adjustments of a row: each option alone, and all of them together."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.sampling.logit_adjustments import (
    BANNED,
    Adjustment,
    LogitAdjustments,
    needs_committed_tokens,
)
from inflight.sampling.params import SamplingParams
from inflight.sampling.repetition import DryPenalty, RepeatedNgrams

ENDS = (90, 91)


def adjustments(
    num_prompt: int = 2,
    bad: tuple[tuple[int, ...], ...] = (),
    breakers: frozenset[int] = frozenset(),
    **params: Any,
) -> LogitAdjustments:
    return LogitAdjustments(SamplingParams(**params), num_prompt, ENDS, bad, breakers)


def adjustment_of(adjustment: Adjustment) -> dict[int, float]:
    assert list(adjustment.token_ids) == sorted(set(adjustment.token_ids))
    return dict(zip(adjustment.token_ids, adjustment.biases, strict=True))


def test_default_params_adjust_no_logits() -> None:
    assert adjustments().of_row([1, 2, 3]).is_empty
    assert adjustments(temperature=0.5, top_k=3, repetition_penalty=1.5).of_row([1, 2]).is_empty


def test_biases_apply_to_every_row() -> None:
    one = adjustments(logit_bias=((7, -3.5), (3, 2.0)))
    assert (
        adjustment_of(one.of_row([1, 2]))
        == adjustment_of(one.of_row([1, 2, 7], [5]))
        == {3: 2.0, 7: -3.5}
    )


def test_no_end_comes_before_min_tokens() -> None:
    one = adjustments(min_tokens=3)
    for token_ids, tail, unknown, early in [
        ([1, 2], [], 0, True),
        ([1, 2, 3, 4], [], 0, True),
        ([1, 2, 3, 4, 5], [], 0, False),
        ([1, 2, 3, 4], [5], 0, False),
        ([1, 2, 3], [], 1, True),
        ([1, 2, 3], [], 2, False),
    ]:
        expected = dict.fromkeys(ENDS, BANNED) if early else {}
        assert adjustment_of(one.of_row(token_ids, tail, unknown)) == expected


def test_a_bad_word_of_one_token_never_comes() -> None:
    one = adjustments(bad=((5,), (6,)), logit_bias=((5, 100.0),))
    assert adjustment_of(one.of_row([1, 2])) == {5: BANNED, 6: BANNED}


def test_a_bad_word_is_completed_by_no_token_of_the_output_or_a_draft() -> None:
    one = adjustments(bad=((5, 6), (1, 5, 6, 7)), num_prompt=2)
    assert one.of_row([1, 5]).is_empty, "the prompt may end with what a bad word begins with"
    assert adjustment_of(one.of_row([1, 5, 5])) == {6: BANNED}
    assert adjustment_of(one.of_row([1, 5], [5])) == {6: BANNED}
    assert adjustment_of(one.of_row([8, 8, 1, 5], [6])) == {7: BANNED}
    assert adjustment_of(one.of_row([8, 8, 1], [5, 6])) == {7: BANNED}
    assert one.of_row([8, 1, 5], [6]).is_empty, "its first token stands in the prompt"
    assert one.of_row([8, 8, 5], [1]).is_empty


def test_allowed_tokens_are_sorted_and_unique() -> None:
    one = adjustments(allowed_token_ids=(9, 4, 9))
    assert one.of_row([1, 2]) == Adjustment((), (), (4, 9))


def test_ends_are_breakers() -> None:
    options = {"dry_multiplier": 1.0, "dry_allowed_length": 1}
    assert adjustments(**options).of_row([5, 90, 3, 5]).is_empty
    assert adjustment_of(adjustments(**options).of_row([5, 6, 3, 5])) == {6: -1.0}
    breakers = frozenset([6])
    assert adjustments(breakers=breakers, **options).of_row([5, 6, 3, 5]).is_empty


@pytest.mark.parametrize(
    ("params", "bad", "needed"),
    [
        ({}, (), False),
        ({"logit_bias": ((1, 1.0),), "allowed_token_ids": (1,), "min_tokens": 3}, (), False),
        ({"repetition_penalty": 1.2, "frequency_penalty": 0.5}, (), False),
        ({}, ((4,), (5,)), False),
        ({}, ((4,), (5, 6)), True),
        ({"no_repeat_ngram_size": 2}, (), True),
        ({"dry_multiplier": 0.8}, (), True),
        ({"dry_multiplier": 0.8, "dry_penalty_last_n": 0}, (), False),
    ],
)
def test_the_host_is_needed_where_tokens_count(
    params: dict[str, Any], bad: tuple[tuple[int, ...], ...], needed: bool
) -> None:
    assert needs_committed_tokens(SamplingParams(**params), bad) is needed
    assert adjustments(bad=bad, **params).needs_committed_tokens is needed


TOKENS = st.lists(st.integers(0, 5), min_size=2, max_size=30)


@given(
    TOKENS,
    st.lists(st.integers(0, 5), max_size=4),
    st.dictionaries(st.integers(0, 7), st.floats(-5, 5), max_size=4),
    st.sampled_from([0, 2, 3]),
    st.sampled_from([0.0, 0.8]),
    st.sampled_from([0, 40]),
    st.sampled_from([(), ((2,),), ((0, 1), (3, 3, 4))]),
)
def test_adjustments_add_up_and_a_ban_stays_a_ban(
    token_ids: list[int],
    tail: list[int],
    bias: dict[int, float],
    ngram: int,
    multiplier: float,
    min_tokens: int,
    bad: tuple[tuple[int, ...], ...],
) -> None:
    one = adjustments(
        bad=bad,
        logit_bias=tuple(bias.items()),
        no_repeat_ngram_size=ngram,
        dry_multiplier=multiplier,
        min_tokens=min_tokens,
    )
    expected = dict(bias)
    if multiplier:
        dry = DryPenalty(multiplier, 1.75, 2, breakers=frozenset(ENDS))
        for token_id, penalty in dry.penalties(token_ids, tail).items():
            expected[token_id] = expected.get(token_id, 0.0) - penalty
    banned = set(ENDS) if min_tokens else set()
    if ngram:
        banned |= RepeatedNgrams(ngram).banned(token_ids, tail)
    output = (*token_ids[2:], *tail)
    for word in bad:
        if len(word) == 1 or output[1 - len(word) :] == word[:-1]:
            banned.add(word[-1])
    expected |= dict.fromkeys(banned, -math.inf)
    one.of_row(token_ids[:-1])
    assert adjustment_of(one.of_row(token_ids, tail)) == pytest.approx(expected)
