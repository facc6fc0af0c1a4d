"""Blocks of an output, from the pieces of its parser."""

from __future__ import annotations

from inflight.door.gateway.generation import Delta
from inflight.door.gateway.openai.blocks import Begun, Blocks, Ended, Grown, Kind
from inflight.door.gateway.parsers import CallArguments, CallBegun, Piece, Reasoning, Text
from inflight.door.gateway.turns import Turn


class Scripted:
    """A parser that finds given pieces, one for each delta."""

    def __init__(self, *pieces: Piece) -> None:
        self._pieces = list(pieces)

    def feed(self, text: str) -> list[Piece]:
        return [self._pieces.pop(0)] if self._pieces else []

    def finish(self) -> list[Piece]:
        return []


def blocks_of(
    *pieces: Piece, reason: str = "stop", shows_reasoning: bool = True
) -> tuple[list[tuple[Kind, str]], list[str]]:
    """Kind and text of each block, and the names of all changes."""
    blocks = Blocks(Turn(Scripted(*pieces)), shows_reasoning)
    changes = [change for _ in pieces for change in blocks.feed(Delta(text_output="x"))]
    changes += blocks.feed(Delta(finish_reason=reason))
    grown = {
        one.index: "".join(
            change.text for change in changes if isinstance(change, Grown) and change.block is one
        )
        for one in blocks.all
    }
    assert [grown[one.index] for one in blocks.all] == [one.text for one in blocks.all]
    assert sum(isinstance(change, Begun) for change in changes) == len(blocks.all)
    assert sum(isinstance(change, Ended) for change in changes) == len(blocks.all)
    assert [one.is_complete for one in blocks.all[:-1]] == [True] * (len(blocks.all) - 1)
    names = [type(change).__name__ for change in changes]
    return [(one.kind, one.text) for one in blocks.all], names


CALL = (CallBegun(0, "add"), CallArguments(0, "{}"))


def test_adjacent_pieces_of_a_kind_are_one_block() -> None:
    found, changes = blocks_of(Reasoning("a"), Reasoning("b"), Text("c"), Text("d"), *CALL)
    assert found == [(Kind.REASONING, "ab"), (Kind.TEXT, "cd"), (Kind.CALL, "{}")]
    assert changes == ["Begun", "Grown", "Grown", "Ended"] * 2 + ["Begun", "Grown", "Ended"]


def test_white_space_between_calls_is_no_block() -> None:
    calls = (*CALL, Text("\n"), CallBegun(1, "add"), CallArguments(1, "{}"), Text("\n"))
    assert blocks_of(*calls)[0] == [(Kind.CALL, "{}")] * 2


def test_white_space_before_text_is_part_of_it() -> None:
    assert blocks_of(Text(" "), Text("\n"), Text("a"))[0] == [(Kind.TEXT, " \na")]
    assert blocks_of(Text("a"), Text(" "), Text("b"))[0] == [(Kind.TEXT, "a b")]


def test_an_output_of_white_space_alone_is_a_block() -> None:
    assert blocks_of(Text(" "), Text("\n"))[0] == [(Kind.TEXT, " \n")]


def test_an_output_without_pieces_has_no_block() -> None:
    assert blocks_of() == ([], [])


def test_reasoning_can_be_left_out() -> None:
    found, _ = blocks_of(Reasoning("a"), Text("b"), shows_reasoning=False)
    assert found == [(Kind.TEXT, "b")]


def test_only_a_block_that_is_cut_off_is_incomplete() -> None:
    for reason, is_complete in (("stop", True), ("length", False)):
        blocks = Blocks(Turn(Scripted(Text("a"), *CALL)))
        for _ in range(3):
            blocks.feed(Delta(text_output="x"))
        assert not blocks.all[-1].is_complete
        blocks.feed(Delta(finish_reason=reason))
        assert [one.is_complete for one in blocks.all] == [True, is_complete]
