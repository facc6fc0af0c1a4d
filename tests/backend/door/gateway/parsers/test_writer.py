from __future__ import annotations

from inflight.door.gateway.parsers.pieces import CallArguments, CallBegun, Reasoning, Text
from inflight.door.gateway.parsers.writer import Writer


def test_adjacent_pieces_of_a_kind_are_joined() -> None:
    writer = Writer()
    for text in "abc":
        writer.reasoning(text)
    writer.text("d")
    writer.text("")
    writer.text("e")
    for name in ("f", "g"):
        writer.begin(name)
        writer.arguments("{")
        writer.arguments("}")
    assert writer.drain() == [
        Reasoning("abc"),
        Text("de"),
        CallBegun(0, "f"),
        CallArguments(0, "{}"),
        CallBegun(1, "g"),
        CallArguments(1, "{}"),
    ]
    assert writer.drain() == []


def test_calls_without_arguments_are_not_joined() -> None:
    writer = Writer()
    writer.begin("f")
    writer.begin("f")
    assert writer.drain() == [CallBegun(0, "f"), CallBegun(1, "f")]
