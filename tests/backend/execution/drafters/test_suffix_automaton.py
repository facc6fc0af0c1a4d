"""The automaton finds the longest suffix that is a substring, and where that occurred first."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.execution.drafters.suffix_automaton import Match, SuffixAutomaton

texts = st.integers(1, 4).flatmap(lambda size: st.lists(st.integers(0, size), max_size=60))


def slow_match(text: list[int], suffix_of: list[int]) -> tuple[int, int]:
    """The definition, as it reads: length, and the last position of the first occurrence."""
    for length in range(min(len(text), len(suffix_of)), 0, -1):
        for end in range(length - 1, len(text)):
            if text[end + 1 - length : end + 1] == suffix_of[-length:]:
                return length, end
    return 0, -1


def automaton_of(text: list[int]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for token in text:
        automaton.append(token)
    return automaton


@settings(max_examples=400, deadline=None)
@given(text=texts, other=texts)
def test_a_match_with_another_text_is_that_of_the_definition(
    text: list[int], other: list[int]
) -> None:
    automaton, match = automaton_of(text), Match()
    for count, token in enumerate(other, 1):
        automaton.advance(match, token)
        found = (match.length, automaton.first_end(match))
        assert found == slow_match(text, other[:count])


@settings(max_examples=400, deadline=None)
@given(text=texts)
def test_a_match_with_the_text_before_is_that_of_the_definition(text: list[int]) -> None:
    automaton, match = SuffixAutomaton(), Match()
    for count, token in enumerate(text):
        automaton.advance(match, token)
        automaton.append(token)
        found = (match.length, automaton.first_end(match))
        assert found == slow_match(text[:count], text[: count + 1])
    assert automaton.tokens.tolist() == text


@settings(max_examples=400, deadline=None)
@given(data=st.data(), text=texts, other=texts)
def test_a_match_lives_on_while_the_text_grows(
    data: st.DataObject, text: list[int], other: list[int]
) -> None:
    """A substring longer than the match may split its state, at any time: it must stay right."""
    automaton, match, known = SuffixAutomaton(), Match(), list[int]()
    growth = iter(text)
    for count, token in enumerate(other, 1):
        for _ in range(data.draw(st.integers(0, 3))):
            for added in growth:
                automaton.append(added)
                known.append(added)
                break
        before = match.length
        automaton.advance(match, token)
        # What has been appended since may make a longer one, which is not looked for.
        suffix = other[:count][-(before + 1) :]
        assert (match.length, automaton.first_end(match)) == slow_match(known, suffix)


@given(text=texts, other=texts)
def test_it_has_few_states(text: list[int], other: list[int]) -> None:
    automaton = automaton_of(text)
    assert len(automaton._links) <= max(2, 2 * len(text))


@pytest.mark.parametrize(
    ("text", "length", "end"),
    [
        ([1, 2, 3, 1, 2], 2, 1),
        ([7, 7, 7], 2, 1),  # it may overlap with itself
        ([1, 2, 3, 4, 2, 3, 1, 2, 3], 3, 2),  # longest, not latest
        ([1, 2, 3], 0, -1),
        ([1], 0, -1),
    ],
)
def test_matches(text: list[int], length: int, end: int) -> None:
    automaton, match = SuffixAutomaton(), Match()
    for token in text:
        automaton.advance(match, token)
        automaton.append(token)
    assert (match.length, automaton.first_end(match)) == (length, end)
