"""The parser of an output, put together from its formats."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from inflight.door.gateway.parsers.formats.registry import FORMATS, find_format
from inflight.door.gateway.parsers.formats.tool_format import Read
from inflight.door.gateway.parsers.pieces import OutputParser, Piece, Text
from inflight.door.gateway.parsers.reader import Reader, Steps
from inflight.door.gateway.parsers.reasoning import check_reasoning_format, read_reasoning
from inflight.door.gateway.parsers.tools import Schemas
from inflight.door.gateway.parsers.writer import Writer

_WHOLE = tuple(one for one in FORMATS.values() if one.is_whole)


def plain() -> OutputParser:
    """The parser of an output that is all content."""
    return _Plain()


def parser_for(
    tool_format: str | None,
    reasoning_format: str | None,
    tool_names: Collection[str],
    in_reasoning: bool = False,
    special: Sequence[str] = (),
) -> OutputParser:
    """The parser of an output.

    Args:
        tool_format: a name in FORMATS; None if the request offers no tools.
        reasoning_format: "think", the name of a format that covers whole outputs, or None.
        tool_names: of the functions that the request offers. As a mapping from each name to the
            schema of its parameters (`schemas_of`), it also tells formats without types those of
            the values.
        in_reasoning: the prompt ends inside of the reasoning (`opens_reasoning`).
        special: markers that are special tokens, which content and reasoning never contain.

    Raises:
        ConfigError: a format is unknown.
    """
    whole = next((one for one in _WHOLE if one.name in (tool_format, reasoning_format)), None)
    if whole is not None:
        offered = () if tool_format is None else tool_names
        steps = _read_output(whole.read, _schemas(offered), False, False)
        return _Parser(steps, Writer(whole.markers))
    if reasoning_format is not None:
        check_reasoning_format(reasoning_format)
    if tool_format is None and reasoning_format is None:
        return plain()
    read = _read_text if tool_format is None else find_format(tool_format).read
    steps = _read_output(read, _schemas(tool_names), reasoning_format is not None, in_reasoning)
    return _Parser(steps, Writer(special))


def _schemas(tool_names: Collection[str]) -> Schemas:
    if isinstance(tool_names, Mapping):
        return dict(tool_names)
    return {name: {} for name in tool_names}


class _Plain:
    def feed(self, text: str) -> list[Piece]:
        return [Text(text)] if text else []

    def finish(self) -> list[Piece]:
        return []


class _Parser:
    """Runs the generator of a format over the parts of an output."""

    def __init__(self, read_all: Callable[[Reader, Writer], Steps[None]], writer: Writer) -> None:
        self._reader = Reader()
        self._writer = writer
        self._steps = read_all(self._reader, writer)

    def feed(self, text: str) -> list[Piece]:
        self._reader.append(text)
        next(self._steps, None)
        return self._writer.drain()

    def finish(self) -> list[Piece]:
        self._reader.ended = True
        next(self._steps, None)
        self._writer.end_text()
        return self._writer.drain()


def _read_output(
    read: Read, schemas: Schemas, has_reasoning: bool, in_reasoning: bool
) -> Callable[[Reader, Writer], Steps[None]]:
    """Reads the reasoning, if there is any, and then the rest."""

    def read_all(reader: Reader, writer: Writer) -> Steps[None]:
        if has_reasoning:
            yield from read_reasoning(reader, writer, in_reasoning)
        yield from read(reader, writer, schemas)

    return read_all


def _read_text(reader: Reader, writer: Writer, schemas: Schemas) -> Steps[None]:
    while (yield from reader.more()):
        writer.text(reader.advance(len(reader.text)))
