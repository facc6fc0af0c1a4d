"""A suffix automaton: all substrings of a growing text, and where each of them occurred first.

Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985): at most 2 n
states and 3 n transitions for n tokens, extended in amortised constant time per token. SAM-Decoding
(Hu et al., arXiv:2411.10666) drafts with it. In Python a token takes some 2 us and half a kilobyte.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

_ROOT = 0  # the state of the empty string
_NONE = -1


@dataclass(slots=True)
class Match:
    """The longest suffix of some text that is a substring of an automaton's text.

    Attributes:
        length: in tokens.
        state: of the automaton, which recognises that suffix.
    """

    length: int = 0
    state: int = _ROOT


class SuffixAutomaton:
    """The automaton of the tokens appended so far.

    A state stands for substrings that end at the same places: one of each length above that of its
    suffix link and up to its own.

    Attributes:
        tokens: int64.
    """

    def __init__(self) -> None:
        self.tokens = array("q")
        self._transitions: list[dict[int, int]] = [{}]
        self._links = array("q", [_NONE])
        self._lengths = array("q", [0])  # of the longest substring
        self._first_ends = array("q", [_NONE])  # position of its first occurrence's last token
        self._last = _ROOT  # the state of the whole text

    def append(self, token: int) -> None:
        """Extend the text by a token."""
        transitions, links = self._transitions, self._links
        state = self._add_state({}, _ROOT, self._lengths[self._last] + 1, len(self.tokens))
        self.tokens.append(token)
        former, self._last = self._last, state
        while former != _NONE and token not in transitions[former]:
            transitions[former][token] = state
            former = links[former]
        if former != _NONE:
            links[state] = self._state_after(former, token)

    def _state_after(self, former: int, token: int) -> int:
        """The state of the longest substring of `former` followed by the token; split off from its
        state if that has longer ones, which do not end here."""
        transitions, links, lengths = self._transitions, self._links, self._lengths
        found, length = transitions[former][token], lengths[former] + 1
        if lengths[found] == length:
            return found
        split = self._add_state(
            transitions[found].copy(), links[found], length, self._first_ends[found]
        )
        links[found] = split
        while former != _NONE and transitions[former].get(token) == found:
            transitions[former][token] = split
            former = links[former]
        return split

    def _add_state(self, transitions: dict[int, int], link: int, length: int, end: int) -> int:
        self._transitions.append(transitions)
        self._links.append(link)
        self._lengths.append(length)
        self._first_ends.append(end)
        return len(self._links) - 1

    def advance(self, match: Match, token: int) -> None:
        """Extend the matched text by a token: `match` becomes that of the longer text.

        For the matches of the automaton's own text with what stands before it, advance by each
        token before it is appended.
        """
        transitions, links, lengths = self._transitions, self._links, self._lengths
        state, length = match.state, match.length
        while state and length <= lengths[links[state]]:  # split since
            state = links[state]
        while state and token not in transitions[state]:
            state = links[state]
            length = lengths[state]
        following = transitions[state].get(token)
        if following is None:
            match.state, match.length = _ROOT, 0
        else:
            match.state, match.length = following, length + 1

    def first_end(self, match: Match) -> int:
        """Position of the last token of the match's first occurrence; -1 if the match is empty."""
        return self._first_ends[match.state]
