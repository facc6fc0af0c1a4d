"""{"name": "f", "parameters": {...}}, of Llama 3.1 and 3.2; several are separated by semicolons.

<|python_tag|> may precede a call. A call of a known function at the start of an output counts
without it.

https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1
"""

from __future__ import annotations

import re

from inflight.door.gateway.parsers.formats.tool_format import CallSyntax, ToolFormat
from inflight.door.gateway.parsers.json_call import read_calls
from inflight.door.gateway.parsers.reader import Reader, Steps
from inflight.door.gateway.parsers.tools import Schemas
from inflight.door.gateway.parsers.writer import Writer

_TAG = "<|python_tag|>"
_SEPARATORS = re.compile(r"[\s;,]+")


def read(reader: Reader, writer: Writer, schemas: Schemas) -> Steps[None]:
    reader.record()
    yield from reader.skip()
    is_marked = yield from reader.accept(_TAG)
    while True:
        yield from reader.skip()
        names = None if is_marked else schemas
        if not (yield from read_calls(reader, writer, names, _SEPARATORS)):
            writer.text(reader.recorded())
        is_marked = bool((yield from reader.until((_TAG,), writer.text)))
        if not is_marked:
            return


FORMAT = ToolFormat(
    name="llama3_json",
    read=read,
    templates=((_TAG,), ('{"name": function name, "parameters"',)),
    syntax=CallSyntax(
        before_name='{"name": "',
        before_arguments='", "parameters": ',
        after="}",
        separator="; ",
    ),
    markers=(_TAG,),
)
