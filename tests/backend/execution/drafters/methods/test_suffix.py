"""The longest suffix that occurs earlier is found, and as many tokens drafted as match."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.core.batch import Chunk
from inflight.core.request import Request
from inflight.core.sequence import Sequence
from inflight.execution.drafters.methods.suffix import SuffixDrafter
from inflight.sampling.params import SamplingParams


def slow_drafts(tokens: list[int], min_match: int, count: int) -> list[int]:
    """The definition, as it reads."""
    last = len(tokens) - 1
    for matched in range(last, min_match - 1, -1):
        for end in range(matched - 1, last):
            if tokens[end + 1 - matched : end + 1] == tokens[-matched:]:
                longer = list(tokens)
                for i in range(min(count, matched)):
                    longer.append(longer[end + 1 + i])
                return longer[len(tokens) :]
    return []


def sequence(tokens: list[int], request_id: int = 0) -> Sequence:
    return Sequence(Request(request_id, tokens, SamplingParams()), 1000)


def chunk(sequence: Sequence, num_drafts: int) -> Chunk:
    last = len(sequence.token_ids) - 1
    return Chunk(sequence, last, 1 + num_drafts, True, num_drafts=num_drafts)


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=60),
    min_match=st.integers(1, 4),
    count=st.integers(1, 8),
)
def test_drafts_are_those_of_the_definition(tokens: list[int], min_match: int, count: int) -> None:
    drafter, one = SuffixDrafter(min_match), sequence(tokens[:1])
    for token in tokens[1:]:
        one.token_ids.append(token)
        expected = slow_drafts(one.token_ids, min_match, count)
        assert drafter.propose([chunk(one, count)]) == [expected]
    # The same as one that sees it all at once.
    assert SuffixDrafter(min_match).propose([chunk(one, count)]) == drafter.propose(
        [chunk(one, count)]
    )


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([1, 2, 3, 9, 1, 2], [3, 9]),  # as many as match
        ([1, 2, 3, 9, 8, 7, 1, 2, 3], [9, 8, 7]),
        ([1, 2, 4, 0, 1, 2, 5, 0, 9, 1, 2], [4, 0]),  # the first
        ([5, 1, 2, 3, 6, 8, 1, 2, 4, 5, 1, 2], [3, 6, 8]),  # the longest
        ([7, 7, 7], [7, 7]),  # past the end it repeats
        ([1, 2, 1], []),  # one token is not enough
        ([1, 2, 3], []),
        ([1], []),
    ],
)
def test_drafts(tokens: list[int], drafts: list[int]) -> None:
    assert slow_drafts(tokens, 2, 3) == drafts
    assert SuffixDrafter(2).propose([chunk(sequence(tokens), 3)]) == [drafts]


def test_text_without_repetition_drafts_next_to_nothing() -> None:
    words = random.Random(5)
    one, drafter, num_drafts = sequence([0]), SuffixDrafter(2), 0
    for _ in range(2000):
        one.token_ids.append(words.randrange(2000))
        num_drafts += len(drafter.propose([chunk(one, 16)])[0])
    assert num_drafts < 0.01 * 2000


def test_a_drafter_follows_its_sequences() -> None:
    drafter = SuffixDrafter(1)
    sequences = [sequence([i, 5, i], i) for i in range(3)]
    for step in range(60):
        for one in sequences:
            expected = slow_drafts(one.token_ids, 1, 4)
            assert drafter.propose([chunk(one, 4)]) == [expected]
            one.token_ids += [(step * step) % 7, one.request_id]
    drafter.forget(sequences[0])
    drafter.forget(sequences[0])
    fresh = sequence([8, 9, 8])  # an id may come again
    assert drafter.propose([chunk(fresh, 0), chunk(fresh, 1)]) == [[], [9]]
