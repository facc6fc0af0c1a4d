from __future__ import annotations

import re
from typing import TypeVar

import pytest

from inflight.door.gateway.parsers.reader import MAX_SPACE, Reader, Steps

T = TypeVar("T")


def begin(text: str) -> Reader:
    reader = Reader()
    reader.append(text)
    return reader


def result(reader: Reader, steps: Steps[T], *parts: str) -> T:
    """What the steps return at the end of the parts, and never before it is certain."""
    for part in (*parts, None):
        try:
            next(steps)
        except StopIteration as stop:
            value: T = stop.value
            return value
        if part is None:
            reader.ended = True
        else:
            reader.append(part)
    with pytest.raises(StopIteration) as stopped:
        next(steps)
    last: T = stopped.value.value
    return last


def test_a_literal_is_refused_at_the_first_character_that_differs() -> None:
    reader = begin("<too")
    assert result(reader, reader.accept("<tool>"), "l>") is True
    assert reader.at == len(reader.text)
    reader = begin("<tx")
    steps = reader.accept("<tool>")
    with pytest.raises(StopIteration) as stopped:
        next(steps)
    assert stopped.value.value is False and reader.at == 0


def test_a_literal_that_the_end_cuts_is_unread() -> None:
    reader = begin("<to")
    assert result(reader, reader.accept("<tool>")) is False
    assert reader.at == 0


def test_a_run_is_bounded() -> None:
    reader = begin("ab")
    assert result(reader, reader.run(re.compile("[a-z]+"), 4), "cdef") == "abcd"
    reader = begin("ab")
    assert result(reader, reader.run(re.compile("[a-z]+"), 4), "c.") == "abc"


def test_text_before_a_marker_is_emitted_and_white_space_is_not() -> None:
    reader, found = begin("a \n "), list[str]()
    assert result(reader, reader.until(("<x>", "<y>"), found.append), "b\t<", "y>z") == "<y>"
    assert "".join(found) == "a \n b"
    assert reader.recorded() == "\t<y>"
    assert reader.text[reader.at :] == "z"


def test_only_what_a_marker_may_begin_with_is_withheld() -> None:
    reader, found = begin("a"), list[str]()
    steps = reader.before(("<tool>", "[t]"), found.append)
    for part, emitted in [("b<t", "ab"), ("oo", "ab"), ("[", "ab<too"), ("t[t", "ab<too[t")]:
        next(steps, None)
        reader.append(part)
        next(steps, None)
        assert "".join(found) == emitted
    assert result(reader, steps) == ""
    assert "".join(found) == "ab<too[t[t"


def test_withheld_white_space_is_bounded() -> None:
    for text in ([" " * 1000 + "<x>"], list(" " * 1000 + "<x>")):
        reader, found = Reader(), list[str]()
        assert result(reader, reader.until(("<x>",), found.append), *text) == "<x>"
        assert "".join(found) == " " * (1000 - MAX_SPACE)
        assert reader.recorded() == " " * MAX_SPACE + "<x>"


def test_what_was_read_since_record_is_recorded() -> None:
    reader = begin("ab")
    reader.advance(1)
    reader.record()
    reader.advance(2)
    reader.append("cd")
    reader.advance(1)
    assert reader.recorded() == "bc"
    reader.advance(2)
    assert reader.recorded() == ""
