"""Prompt lookup finds the longest, then the latest match, without a scan in Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.core.batch import Chunk
from inflight.core.request import Request
from inflight.core.sequence import Sequence
from inflight.execution.drafters.methods.ngram import NgramDrafter
from inflight.sampling.params import SamplingParams
from inflight_kernels.torch_ops.drafting import RESUME_AGE, RESUME_TOKENS, Copy, propose


def slow_match(
    tokens: list[int],
    max_match: int,
    min_match: int,
    count: int,
    per_match: int = 0,
    max_resumed: int = 100,
    copy: Copy | None = None,
) -> tuple[list[int], Copy | None]:
    """The definition, as it reads."""
    left, num_since = None, 0
    if copy is not None:
        num_copied = 0
        for old, new in zip(tokens[copy.start :], tokens[copy.length :], strict=False):
            if old != new or num_copied == RESUME_TOKENS:
                break
            num_copied += 1
        num_since = len(tokens) - copy.length - num_copied
        if num_since <= RESUME_AGE:
            left = copy.start + num_copied
    for matched in range(min(max_match, len(tokens)), -1, -1):
        ends = [
            end
            for end in range(len(tokens) - 2, matched - 2, -1)
            if tokens[end - matched + 1 : end + 1] == tokens[-matched:]
        ]
        near = [end for end in ends if left is not None and 0 <= end - left < RESUME_TOKENS]
        if matched == 0:  # a replacement
            if left is None or num_since != 1 or left + 1 >= len(tokens):
                continue
            start = left + 1
        elif near:
            start = near[-1] + 1
        elif ends and matched >= min_match:
            start = ends[0] + 1
        else:
            continue
        longer = list(tokens)
        limits = [count]
        if matched < min_match:
            limits.append(max_resumed)
        if per_match:
            limits.append(per_match * matched)
        for i in range(min(limits)):
            longer.append(longer[start + i])
        return longer[len(tokens) :], Copy(start, len(tokens)) if matched else copy
    return [], copy


@settings(max_examples=400, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=90),
    max_match=st.integers(1, 6),
    less=st.integers(0, 5),
    count=st.integers(1, 8),
    per_match=st.integers(0, 2),
    max_resumed=st.integers(1, 8),
    places=st.tuples(st.integers(0, 88), st.integers(0, 88)) | st.none(),
)
def test_a_match_is_that_of_the_definition(
    tokens: list[int],
    max_match: int,
    less: int,
    count: int,
    per_match: int,
    max_resumed: int,
    places: tuple[int, int] | None,
) -> None:
    min_match = max(1, max_match - less)
    copy = None
    if places is not None and max(places) < len(tokens):
        copy = Copy(min(places), max(places) + 1)
    limits = {"per_match": per_match, "max_resumed": max_resumed}
    found = propose(np.array(tokens), max_match, min_match, count, copy=copy, **limits)
    assert found == slow_match(tokens, max_match, min_match, count, copy=copy, **limits)


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([1, 2, 3, 9, 1, 2], [3, 9, 1]),
        ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1, 2]),  # the latest
        ([5, 1, 2, 3, 6, 1, 2, 4, 5, 1, 2], [3, 6, 1]),  # the longest
        ([7, 7, 7], [7, 7, 7]),  # past the end it repeats
        ([1, 2, 1], []),  # one token is not enough
        ([1, 2, 3], []),
        ([1], []),
    ],
)
def test_drafts(tokens: list[int], drafts: list[int]) -> None:
    found, _ = propose(np.array(tokens), 4, 2, 3)
    assert found == drafts


PASSAGE = [*range(10, 40)]


def test_a_copy_goes_on_after_an_edit() -> None:
    """With the first token of the passage behind the edit."""
    drafter = NgramDrafter(4, 2)
    text = Sequence(Request(1, [*PASSAGE, 1, 10, 11], SamplingParams()), 1000)
    assert drafter.propose([chunk(text, 3)]) == [[12, 13, 14]]
    text.token_ids += [12, 13, 99]  # and another one, perhaps in the place of the next token
    assert drafter.propose([chunk(text, 3)]) == [[15]]
    text.token_ids += [98]
    assert drafter.propose([chunk(text, 3)]) == [[]]
    text.token_ids += [20]
    assert drafter.propose([chunk(text, 3)]) == [[21]]
    text.token_ids += [21]
    assert drafter.propose([chunk(text, 3)]) == [[22, 23, 24]]


def test_a_copy_that_was_left_long_ago_is_not_resumed() -> None:
    drafter = NgramDrafter(4, 2)
    text = Sequence(Request(1, [*PASSAGE, 1, 10, 11], SamplingParams()), 1000)
    drafter.propose([chunk(text, 3)])
    text.token_ids += [12, *range(100, 100 + RESUME_AGE)]
    text.token_ids[-1] = 16
    assert drafter.propose([chunk(text, 3)]) == [[17]]
    text.token_ids += [*range(200, 200 + RESUME_AGE), 30]
    assert drafter.propose([chunk(text, 3)]) == [[]]


def test_of_equal_matches_that_which_goes_on_where_the_text_copied_is_drafted() -> None:
    """Not the latest, in the lines that follow."""
    lines = [50, 1, 2, 60, 1, 2, 61, 1, 2, 62]
    drafter = NgramDrafter(4, 2)
    text = Sequence(Request(1, [*lines, 50, 1, 2], SamplingParams()), 1000)
    assert drafter.propose([chunk(text, 1)]) == [[60]]
    text.token_ids += [77, 78, 1, 2]
    assert drafter.propose([chunk(text, 1)]) == [[61]]


def chunk(sequence: Sequence, num_drafts: int) -> Chunk:
    last = len(sequence.token_ids) - 1
    return Chunk(sequence, last, 1 + num_drafts, True, num_drafts=num_drafts)


def test_a_drafter_follows_its_sequences() -> None:
    drafter = NgramDrafter(3, 1)
    sequences = [Sequence(Request(i, [i, 5, i], SamplingParams()), 1000) for i in range(3)]
    copies: list[Copy | None] = [None] * len(sequences)
    for step in range(400):
        for place, one in enumerate(sequences):
            expected, copies[place] = slow_match(
                one.token_ids, 3, 1, 4, max_resumed=1, copy=copies[place]
            )
            assert drafter.propose([chunk(one, 4)]) == [expected]
            one.token_ids += [(step * step) % 7, one.request_id]
    drafter.forget(sequences[0])
    drafter.forget(sequences[0])
    fresh = Sequence(Request(0, [8, 9, 8], SamplingParams()), 10)  # an id may come again
    assert drafter.propose([chunk(fresh, 2)]) == [[9, 8]]
    assert drafter.propose([chunk(fresh, 0), chunk(fresh, 1)]) == [[], [9]]
