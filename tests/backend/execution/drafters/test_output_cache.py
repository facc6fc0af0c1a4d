"""Outputs are found by requests of the same salt only, and their memory is bounded."""

from __future__ import annotations

import gc
import weakref

from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.core.request import Request
from inflight.core.sequence import Sequence
from inflight.execution.drafters.output_cache import (
    SEPARATOR,
    CachedMatches,
    OutputCache,
)
from inflight.sampling.params import SamplingParams

tokens = st.lists(st.integers(0, 3), max_size=30)


def finished(output: list[int], salt: str = "", prompt: tuple[int, ...] = (9,)) -> Sequence:
    one = Sequence(Request(1, list(prompt), SamplingParams(), cache_salt=salt), 1000)
    one.token_ids += output
    return one


def found(cache: OutputCache, text: list[int], salt: str = "", count: int = 8) -> list[int]:
    matches = CachedMatches()
    matches.follow(text, cache.automata_of(salt))
    return matches.drafts(count, 1, 0)


def slow_drafts(outputs: list[list[int]], text: list[int], count: int) -> list[int]:
    """The definition, as it reads, for one automaton."""
    whole = [token for output in outputs for token in [*output, SEPARATOR]]
    for length in range(min(len(text), len(whole)), 0, -1):
        for end in range(length - 1, len(whole)):
            if whole[end + 1 - length : end + 1] == text[-length:]:
                following = whole[end + 1 : end + 1 + min(count, length)]
                return following[: [*following, SEPARATOR].index(SEPARATOR)]
    return []


@settings(max_examples=300, deadline=None)
@given(outputs=st.lists(tokens.filter(len), max_size=4), text=tokens, count=st.integers(1, 8))
def test_drafts_are_those_of_the_definition(
    outputs: list[list[int]], text: list[int], count: int
) -> None:
    cache = OutputCache(1000)
    for output in outputs:
        cache.add(finished(output))
    assert found(cache, text, count=count) == slow_drafts(outputs, text, count)


def test_an_output_is_found_with_its_salt_only() -> None:
    cache = OutputCache(1000)
    cache.add(finished([1, 2, 3, 4, 5, 6], "a"))
    cache.add(finished([1, 2, 3, 7, 8, 9], "b"))
    assert found(cache, [1, 2, 3], "a") == [4, 5, 6]
    assert found(cache, [1, 2, 3], "b") == [7, 8, 9]
    assert found(cache, [1, 2, 3], "") == []
    assert found(cache, [1, 2, 3], "tenant\0a") == []


def test_prompts_are_not_kept() -> None:
    cache = OutputCache(1000)
    cache.add(finished([7], prompt=(1, 2, 3, 4)))
    assert found(cache, [1, 2]) == []


def test_the_older_outputs_of_a_salt_go_first() -> None:
    cache = OutputCache(60)
    for first in range(0, 200, 10):
        cache.add(finished(list(range(first, first + 10))))
    assert found(cache, [190, 191]) == [192, 193]
    assert found(cache, [170, 171]) == [172, 173]
    assert found(cache, [100, 101]) == []


def test_the_salts_used_least_recently_go_first() -> None:
    cache = OutputCache(40)
    cache.add(finished([1, 2, 3, 4, 5, 6, 7, 8, 9], "a"))
    cache.add(finished([1, 2, 3, 4, 5, 6, 7, 8, 9], "b"))
    cache.automata_of("a")
    for salt in "cdef":
        cache.add(finished([1, 2, 3, 4, 5, 6, 7, 8, 9], salt))
        assert found(cache, [1, 2], "a") == [3, 4]
    assert found(cache, [1, 2], "b") == found(cache, [1, 2], "c") == []
    assert found(cache, [1, 2], "d") == found(cache, [1, 2], "f") == [3, 4]


@settings(deadline=None)
@given(
    max_tokens=st.integers(1, 60),
    outputs=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 70)), max_size=30),
)
def test_it_never_holds_more_than_its_tokens(
    max_tokens: int, outputs: list[tuple[str, int]]
) -> None:
    cache = OutputCache(max_tokens)
    for salt, length in outputs:
        cache.add(finished([5] * length, salt))
        held = [len(automaton.tokens) for own in "abc" for automaton in cache.automata_of(own)]
        assert sum(held) == cache._num_tokens <= max_tokens


def test_dropped_outputs_take_no_memory_while_a_text_still_follows_them() -> None:
    cache, matches = OutputCache(40), CachedMatches()
    cache.add(finished([1, 2, 3], "a"))
    matches.follow([1, 2], cache.automata_of("a"))
    held = weakref.ref(cache.automata_of("a")[0])
    for salt in "bcdefgh":
        cache.add(finished([1] * 15, salt))
    gc.collect()
    assert held() is None
    matches.follow([1, 2, 3], cache.automata_of("a"))
    assert matches.drafts(4, 1, 0) == []


@settings(max_examples=300, deadline=None)
@given(data=st.data(), text=st.lists(st.integers(0, 2), min_size=1, max_size=40))
def test_a_text_that_is_followed_finds_what_a_new_one_finds(
    data: st.DataObject, text: list[int]
) -> None:
    """Whatever came and went meanwhile, once it has seen as many tokens as it kept."""
    cache, matches = OutputCache(40), CachedMatches()
    for end in range(len(text)):
        if data.draw(st.booleans()):
            cache.add(finished(data.draw(st.lists(st.integers(0, 2), max_size=15))))
        matches.follow(text[:end], cache.automata_of(""))
    # No match spans a token that no output has.
    whole = [*text, 7, *text]
    for end in range(len(text), len(whole) + 1):
        matches.follow(whole[:end], cache.automata_of(""))
    assert matches.drafts(8, 1, 0) == found(cache, whole)
