"""The incremental repetition indexes match a search of the whole sequence."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.sampling.repetition import (
    MAX_DRY_EXPONENT,
    MAX_DRY_PENALTY,
    DryPenalty,
    RepeatedNgrams,
)

# Few different tokens: they repeat.
TOKENS = st.lists(st.integers(0, 3), max_size=60)
TAIL = st.lists(st.integers(0, 3), max_size=6)


def repeated(tokens: list[int], size: int) -> set[int]:
    """The definition: the token after each earlier occurrence of the last size - 1 tokens."""
    if len(tokens) < size - 1:
        return set()
    end = tokens[len(tokens) - size + 1 :]
    return {
        tokens[i + size - 1]
        for i in range(len(tokens) - size + 1)
        if tokens[i : i + size - 1] == end
    }


def dry(
    tokens: list[int],
    multiplier: float,
    base: float,
    allowed: int,
    last_n: int,
    breakers: frozenset[int],
) -> dict[int, float]:
    """The definition, as in text-generation-webui: each earlier occurrence of the last token is
    followed backwards as far as it matches."""
    if last_n >= 0:
        tokens = tokens[max(0, len(tokens) - last_n) :]
    longest: dict[int, int] = {}
    for i in range(len(tokens) - 1):
        length = 0
        while (
            length <= i
            and length < allowed + MAX_DRY_EXPONENT
            and tokens[i - length] == tokens[-1 - length]
            and tokens[i - length] not in breakers
        ):
            length += 1
        following = tokens[i + 1]
        if length >= allowed and following not in breakers:
            longest[following] = max(longest.get(following, 0), length)
    return {
        token_id: min(multiplier * base ** (length - allowed), MAX_DRY_PENALTY)
        for token_id, length in longest.items()
    }


@given(TOKENS, TAIL, st.integers(2, 5), st.lists(st.integers(0, 60)))
def test_repeated_ngrams_are_those_of_the_whole_sequence(
    tokens: list[int], tail: list[int], size: int, cuts: list[int]
) -> None:
    index = RepeatedNgrams(size)
    for cut in sorted(cut for cut in cuts if cut <= len(tokens)):
        assert index.banned(tokens[:cut]) == repeated(tokens[:cut], size)
        assert index.banned(tokens[:cut], tail) == repeated(tokens[:cut] + tail, size)
    assert index.banned(tokens, tail) == repeated(tokens + tail, size)
    assert index.banned(tokens) == repeated(tokens, size), "a tail leaves no trace"


@given(
    TOKENS,
    TAIL,
    st.integers(1, 4),
    st.sampled_from([-1, 1, 3, 10, 1000]),
    st.frozensets(st.integers(0, 3), max_size=2),
    st.lists(st.integers(0, 60)),
)
@settings(max_examples=400)
def test_dry_penalties_are_those_of_the_whole_sequence(
    tokens: list[int],
    tail: list[int],
    allowed: int,
    last_n: int,
    breakers: frozenset[int],
    cuts: list[int],
) -> None:
    options = (0.8, 1.75, allowed, last_n, breakers)
    index = DryPenalty(*options)
    for cut in sorted(cut for cut in cuts if cut <= len(tokens)):
        assert index.penalties(tokens[:cut]) == dry(tokens[:cut], *options)
        assert index.penalties(tokens[:cut], tail) == dry(tokens[:cut] + tail, *options)
    assert index.penalties(tokens, tail) == dry(tokens + tail, *options)
    assert index.penalties(tokens) == dry(tokens, *options), "a tail leaves no trace"


@pytest.mark.parametrize("seed", range(4))
def test_dry_looks_at_all_of_very_many_occurrences(seed: int) -> None:
    """Thousands, of which the longest repetitions may be the first ones."""
    rng = random.Random(seed)
    first = [rng.randrange(3) for _ in range(60)]
    tokens = [*first, 8, *[rng.randrange(3) for _ in range(6000)], *first]
    options = (0.8, 1.1, 1, -1, frozenset([7]))
    assert 8 in dry(tokens, *options)
    assert DryPenalty(*options).penalties(tokens) == dry(tokens, *options)


def test_dry_punishes_longer_repetitions_more() -> None:
    index = DryPenalty(1.0, 2.0, 2)
    assert index.penalties([1, 2, 3, 9, 1, 2]) == {3: 1.0}
    assert index.penalties([1, 2, 3, 9, 1, 2, 3]) == {9: 2.0}
    assert index.penalties([1, 2, 3, 9, 1, 2, 3, 9]) == {1: 4.0}


def test_dry_stops_at_a_breaker_and_does_not_punish_one() -> None:
    tokens = [1, 2, 3, 7, 4, 5, 1, 2, 3, 7, 4]
    assert DryPenalty(1.0, 2.0, 1).penalties(tokens) == {5: 2.0**4}
    assert DryPenalty(1.0, 2.0, 1, breakers=frozenset([7])).penalties(tokens) == {5: 1.0}
    assert DryPenalty(1.0, 2.0, 1, breakers=frozenset([5])).penalties(tokens) == {}


def test_a_long_repetition_costs_a_finite_number() -> None:
    assert DryPenalty(100.0, 10.0, 1).penalties([5] * 3000) == {5: MAX_DRY_PENALTY}
    near_one = DryPenalty(1.0, 1.001, 2).penalties([5] * 3000)
    assert near_one == {5: pytest.approx(1.001**MAX_DRY_EXPONENT)}


@pytest.mark.alone
@pytest.mark.parametrize(
    "tokens",
    [[5] * 50_000, [5, 6] * 25_000, list(range(50_000)), [i % 700 for i in range(50_000)]],
    ids=["one", "two", "all", "period"],
)
def test_the_cost_of_a_step_does_not_grow_with_the_sequence(tokens: list[int]) -> None:
    """Generous: a look at each token in Python would take longer than a hundred of these."""
    index, penalty = RepeatedNgrams(3), DryPenalty(0.8, 1.75, 2)
    index.banned(tokens)
    penalty.penalties(tokens)
    before = time.process_time()
    for i in range(100):
        tokens.append(tokens[i])
        index.banned(tokens, [1, 2])
        penalty.penalties(tokens, [1, 2])
    assert time.process_time() - before < 0.5
