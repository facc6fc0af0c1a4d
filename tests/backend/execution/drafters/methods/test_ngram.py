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
from inflight_kernels.torch_ops.drafting import latest_match


def slow_match(
    tokens: list[int], max_match: int, min_match: int, count: int, per_match: int = 0
) -> list[int]:
    """The definition, as it reads."""
    for matched in range(min(max_match, len(tokens)), min_match - 1, -1):
        for end in range(len(tokens) - 2, matched - 2, -1):
            if tokens[end - matched + 1 : end + 1] == tokens[-matched:]:
                longer = list(tokens)
                for i in range(min(count, per_match * matched) if per_match else count):
                    longer.append(longer[end + 1 + i])
                return longer[len(tokens) :]
    return []


@settings(max_examples=400, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    max_match=st.integers(1, 6),
    less=st.integers(0, 5),
    count=st.integers(1, 8),
    per_match=st.integers(0, 2),
)
def test_a_match_is_that_of_the_definition(
    tokens: list[int], max_match: int, less: int, count: int, per_match: int
) -> None:
    min_match = max(1, max_match - less)
    found = latest_match(np.array(tokens), max_match, min_match, count, per_match)
    assert found == slow_match(tokens, max_match, min_match, count, per_match)


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
    assert latest_match(np.array(tokens), 4, 2, 3) == drafts


def chunk(sequence: Sequence, num_drafts: int) -> Chunk:
    last = len(sequence.token_ids) - 1
    return Chunk(sequence, last, 1 + num_drafts, True, num_drafts=num_drafts)


def test_a_drafter_follows_its_sequences() -> None:
    drafter = NgramDrafter(3, 1)
    sequences = [Sequence(Request(i, [i, 5, i], SamplingParams()), 1000) for i in range(3)]
    for step in range(400):
        for one in sequences:
            expected = slow_match(one.token_ids, 3, 1, 4)
            assert drafter.propose([chunk(one, 4)]) == [expected]
            one.token_ids += [(step * step) % 7, one.request_id]
    drafter.forget(sequences[0])
    drafter.forget(sequences[0])
    fresh = Sequence(Request(0, [8, 9, 8], SamplingParams()), 10)  # an id may come again
    assert drafter.propose([chunk(fresh, 2)]) == [[9, 8]]
    assert drafter.propose([chunk(fresh, 0), chunk(fresh, 1)]) == [[], [9]]
