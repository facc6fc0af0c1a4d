"""A JSON array of calls, or one call: [{"name": "f", "arguments": {...}}].

The format of guided calls where the model's own cannot be written as a grammar. Only a call of a
known function at the start of an output counts.
"""

from __future__ import annotations

import re

from inflight.door.gateway.parsers.formats.tool_format import CallSyntax, ToolFormat
from inflight.door.gateway.parsers.json_call import read_calls
from inflight.door.gateway.parsers.reader import Reader, Steps
from inflight.door.gateway.parsers.tools import Schemas
from inflight.door.gateway.parsers.writer import Writer

SEPARATORS = re.compile(r"[\s,]+")


def read(reader: Reader, writer: Writer, schemas: Schemas) -> Steps[None]:
    reader.record()
    yield from reader.skip()
    if not (yield from read_array(reader, writer, schemas)):
        writer.text(reader.recorded())
    while (yield from reader.more()):
        writer.text(reader.advance(len(reader.text)))


def read_array(reader: Reader, writer: Writer, schemas: Schemas | None) -> Steps[bool]:
    """Read an array of calls, or one call; the reader records.

    Returns:
        Whether there was a call; if not, what was recorded is text.
    """
    is_array = yield from reader.accept("[")
    if is_array:
        yield from reader.skip()
    if not (yield from read_calls(reader, writer, schemas, SEPARATORS)):
        return False
    if is_array and (yield from reader.accept("]")):
        yield from reader.skip()
    return True


FORMAT = ToolFormat(
    name="json",
    read=read,
    syntax=CallSyntax(
        before_name='{"name": "',
        before_arguments='", "arguments": ',
        after="}",
        opening="[",
        separator=", ",
        closing="]",
    ),
)
