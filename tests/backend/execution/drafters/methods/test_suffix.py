"""The longest suffix that occurs earlier is found, and two tokens drafted for each that matches."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.config import SpeculativeConfig
from inflight.core.batch import Chunk
from inflight.core.request import FinishReason, Request
from inflight.core.sequence import Sequence
from inflight.execution.drafters.drafter_spec import DrafterSpec
from inflight.execution.drafters.methods.suffix import SuffixDrafter
from inflight.execution.drafters.output_cache import OutputCache
from inflight.execution.drafters.registry import find_method
from inflight.sampling.params import SamplingParams


def slow_drafts(tokens: list[int], min_match: int, count: int) -> list[int]:
    """The definition, as it reads."""
    last = len(tokens) - 1
    for matched in range(last, min_match - 1, -1):
        for end in range(matched - 1, last):
            if tokens[end + 1 - matched : end + 1] == tokens[-matched:]:
                longer = list(tokens)
                for i in range(min(count, 2 * matched)):
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
        ([1, 2, 3, 9, 8, 7, 1, 2], [3, 9, 8, 7]),  # two for each that matches
        ([1, 2, 3, 9, 8, 7, 6, 5, 1, 2, 3], [9, 8, 7, 6, 5]),
        ([1, 2, 4, 0, 1, 2, 5, 0, 9, 1, 2], [4, 0, 1, 2]),  # the first
        ([5, 1, 2, 3, 6, 8, 1, 2, 4, 5, 1, 2], [3, 6, 8, 1, 2]),  # the longest
        ([7, 7, 7], [7, 7, 7, 7]),  # past the end it repeats
        ([1, 2, 1], []),  # one token is not enough
        ([1, 2, 3], []),
        ([1], []),
    ],
)
def test_drafts(tokens: list[int], drafts: list[int]) -> None:
    assert slow_drafts(tokens, 2, 5) == drafts
    assert SuffixDrafter(2).propose([chunk(sequence(tokens), 5)]) == [drafts]


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


# ---------------------------------------------------------------- outputs of earlier requests


def finish(drafter: SuffixDrafter, one: Sequence, reason: FinishReason) -> None:
    one.finish_reason = reason
    drafter.forget(one)


def of_salt(tokens: list[int], salt: str) -> Sequence:
    return Sequence(Request(2, tokens, SamplingParams(), cache_salt=salt), 1000)


def test_the_longest_match_counts_whether_in_the_text_or_in_outputs() -> None:
    drafter, earlier = SuffixDrafter(2, OutputCache(1000)), sequence([0])
    earlier.token_ids += [1, 2, 3, 4, 5, 6]
    finish(drafter, earlier, FinishReason.STOP)
    for tokens, drafts, from_outputs in (
        ([1, 2, 3], [4, 5, 6], {0}),
        ([8, 1, 2, 7, 1, 2], [7, 1, 2], set()),  # as long in the text itself
        ([8, 1, 2, 7, 0, 1, 2, 3], [4, 5, 6], {0}),
        ([6, 3], [], set()),  # too short
    ):
        one = sequence(tokens)
        assert drafter.propose([chunk(one, 3)]) == [drafts]
        assert drafter.from_outputs == from_outputs
        drafter.forget(one)


def test_outputs_are_found_with_their_salt_only() -> None:
    drafter, earlier = SuffixDrafter(1, OutputCache(1000)), of_salt([0], "a")
    earlier.token_ids += [1, 2, 3, 4]
    finish(drafter, earlier, FinishReason.LENGTH)
    assert drafter.propose([chunk(of_salt([1, 2], "b"), 4)]) == [[]]
    assert drafter.propose([chunk(of_salt([1, 2], ""), 4)]) == [[]]
    drafter.forget(of_salt([0], ""))
    assert drafter.propose([chunk(of_salt([1, 2], "a"), 4)]) == [[3, 4]]


def test_outputs_that_were_cancelled_or_failed_are_not_kept() -> None:
    drafter = SuffixDrafter(1, OutputCache(1000))
    for reason in (FinishReason.CANCELLED, None):
        earlier = sequence([0])
        earlier.token_ids += [1, 2, 3, 4]
        earlier.finish_reason = reason
        drafter.forget(earlier)
    assert drafter.propose([chunk(sequence([1, 2]), 4)]) == [[]]


def test_a_method_keeps_outputs_if_it_is_told_to() -> None:
    for max_tokens in (0, 100):
        settings = SpeculativeConfig(method="suffix", suffix_decoding_max_cached_tokens=max_tokens)
        method = find_method(settings)
        assert method.load_on_host is not None
        drafter = method.load_on_host(DrafterSpec(method, settings))
        assert isinstance(drafter, SuffixDrafter)
        earlier = sequence([0])
        earlier.token_ids += [1, 2, 3, 4]
        finish(drafter, earlier, FinishReason.STOP)
        assert drafter.propose([chunk(sequence([1, 2]), 4)]) == [[3, 4] if max_tokens else []]
