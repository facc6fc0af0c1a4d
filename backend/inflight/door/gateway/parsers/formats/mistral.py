"""[TOOL_CALLS], of Mistral: an array of calls, or names with their arguments.

    [TOOL_CALLS] [{"name": "f", "arguments": {...}, "id": "..."}]      tokenizers up to version 7
    [TOOL_CALLS]f[ARGS]{...}[TOOL_CALLS]g[ARGS]{...}                   from version 11 on

A [CALL_ID] may precede [ARGS], and [ARGS] may be absent. All three are special tokens, which a text
may lack: calls of known functions at the start of an output count without them.

https://github.com/mistralai/mistral-common
"""

from __future__ import annotations

import re

from inflight.door.gateway.parsers.formats.json_list import read_array
from inflight.door.gateway.parsers.formats.tool_format import ToolFormat
from inflight.door.gateway.parsers.json_call import MAX_NAME, JsonCall
from inflight.door.gateway.parsers.reader import Reader, Steps
from inflight.door.gateway.parsers.tools import Schemas
from inflight.door.gateway.parsers.writer import Writer

_CALLS = "[TOOL_CALLS]"
_ID = "[CALL_ID]"
_ARGS = "[ARGS]"
_NAME = re.compile(r"[a-zA-Z0-9_.-]+")


def read(reader: Reader, writer: Writer, schemas: Schemas) -> Steps[None]:
    reader.record()
    yield from reader.skip()
    while not (yield from reader.accept(_CALLS)):
        if not (yield from _unmarked(reader, writer, schemas)):
            writer.text(reader.recorded())
            if not (yield from reader.until((_CALLS,), writer.text)):
                return
            break
        reader.record()
    while True:
        yield from reader.skip()
        if not (yield from _marked(reader, writer)):
            writer.text(reader.recorded())
        yield from reader.skip()
        if not (yield from reader.until((_CALLS,), writer.text)):
            return


def _marked(reader: Reader, writer: Writer) -> Steps[bool]:
    """Read what follows the marker; False if it is no call."""
    if (yield from reader.peek()) in ("[", "{"):
        return (yield from read_array(reader, writer, None))
    name = yield from reader.run(_NAME, MAX_NAME)
    if (yield from reader.accept(_ID)):
        yield from reader.run(_NAME, MAX_NAME)
    yield from reader.accept(_ARGS)
    yield from reader.skip()
    if not name or (yield from reader.peek()) != "{":
        return False
    call = JsonCall(reader, writer, None, end=_CALLS)
    yield from call.begin(name)
    return True


def _unmarked(reader: Reader, writer: Writer, schemas: Schemas) -> Steps[bool]:
    """Read calls without markers; False if there is none."""
    first = yield from reader.peek()
    if first == "[":
        return (yield from read_array(reader, writer, schemas))
    name = ""
    while any(known.startswith(name) for known in schemas):
        char = yield from reader.peek()
        if char == "{" and name in schemas:
            yield from JsonCall(reader, writer, schemas).begin(name)
            yield from reader.skip()
            return True
        if not char or not _NAME.match(char):
            return False
        name += reader.advance(reader.at + 1)
    return False


FORMAT = ToolFormat(
    name="mistral",
    read=read,
    templates=((_CALLS,),),
    markers=(_CALLS, _ID, _ARGS),
)
