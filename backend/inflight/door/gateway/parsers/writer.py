"""Collects the pieces of an output."""

from __future__ import annotations

from itertools import groupby

from inflight.door.gateway.parsers.pieces import CallArguments, CallBegun, Piece, Reasoning, Text


class Writer:
    """Pieces in order; calls are numbered from 0."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._num_calls = 0

    def text(self, text: str) -> None:
        if text:
            self._pieces.append(Text(text))

    def reasoning(self, text: str) -> None:
        if text:
            self._pieces.append(Reasoning(text))

    def begin(self, name: str) -> None:
        """A call, whose arguments follow."""
        self._pieces.append(CallBegun(self._num_calls, name))
        self._num_calls += 1

    def arguments(self, text: str) -> None:
        """More of the arguments of the call that began last."""
        if text:
            self._pieces.append(CallArguments(self._num_calls - 1, text))

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


def _kind(piece: Piece) -> tuple[type[Piece], int]:
    index = piece.index if isinstance(piece, CallBegun | CallArguments) else -1
    return type(piece), index
