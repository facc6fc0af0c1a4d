"""Collects the pieces of an output."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from inflight.door.gateway.parsers.pieces import CallArguments, CallBegun, Piece, Reasoning, Text


class Writer:
    """Pieces in order; calls are numbered from 0.

    Args:
        special: markers that are special tokens, which content and reasoning never contain.
    """

    def __init__(self, special: Sequence[str] = ()) -> None:
        self._pieces: list[Piece] = []
        self._num_calls = 0
        self._filter = _Filter(special) if special else None
        self._filtered: type[Text] | type[Reasoning] = Text

    def text(self, text: str) -> None:
        self._add(Text, text)

    def reasoning(self, text: str) -> None:
        self._add(Reasoning, text)

    def begin(self, name: str) -> None:
        """A call, whose arguments follow."""
        self.end_text()
        self._pieces.append(CallBegun(self._num_calls, name))
        self._num_calls += 1

    def arguments(self, text: str) -> None:
        """More of the arguments of the call that began last."""
        if text:
            self._pieces.append(CallArguments(self._num_calls - 1, text))

    def end_text(self) -> None:
        """What may be the start of a marker is none: something else follows."""
        if self._filter is not None:
            rest = self._filter.finish()
            if rest:
                self._pieces.append(self._filtered(rest))

    def _add(self, kind: type[Text] | type[Reasoning], text: str) -> None:
        if self._filter is not None:
            if kind is not self._filtered:
                self.end_text()
                self._filtered = kind
            text = self._filter.feed(text)
        if text:
            self._pieces.append(kind(text))

    def drain(self) -> list[Piece]:
        """The pieces since the last time; adjacent ones of a kind are joined."""
        pieces, self._pieces = self._pieces, []
        if len(pieces) < 2:
            return pieces
        found: list[Piece] = []
        for _, group in groupby(pieces, key=_kind):
            first, *rest = group
            if rest and not isinstance(first, CallBegun):
                text = "".join(
                    piece.text for piece in (first, *rest) if not isinstance(piece, CallBegun)
                )
                first = (
                    CallArguments(first.index, text)
                    if isinstance(first, CallArguments)
                    else type(first)(text)
                )
            found.append(first)
        return found


class _Filter:
    """Drops markers from a text that arrives in parts."""

    def __init__(self, markers: Sequence[str]) -> None:
        self._markers = markers
        self._search = re.compile("|".join(map(re.escape, markers)))
        self._held = ""  # what a marker may begin with

    def feed(self, text: str) -> str:
        text = self._held + text
        kept = []
        at = 0
        for match in self._search.finditer(text):
            kept.append(text[at : match.start()])
            at = match.end()
        start = self._possible(text, at)
        self._held = text[start:]
        return "".join((*kept, text[at:start]))

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held

    def _possible(self, text: str, at: int) -> int:
        """Where the longest end of the text, from `at` on, begins that a marker starts with."""
        longest = max(map(len, self._markers)) - 1
        for start in range(max(at, len(text) - longest), len(text)):
            if any(marker.startswith(text[start:]) for marker in self._markers):
                return start
        return len(text)


def _kind(piece: Piece) -> tuple[type[Piece], int]:
    index = piece.index if isinstance(piece, CallBegun | CallArguments) else -1
    return type(piece), index
