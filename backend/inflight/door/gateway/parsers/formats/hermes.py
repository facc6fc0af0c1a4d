"""<tool_call>{"name": "f", "arguments": {...}}</tool_call>, of Hermes, Qwen 2.5 and Qwen 3.

https://github.com/NousResearch/Hermes-Function-Calling
"""

from __future__ import annotations

import re

from inflight.door.gateway.parsers.formats.tool_format import CallSyntax, ToolFormat
from inflight.door.gateway.parsers.json_call import JsonCall
from inflight.door.gateway.parsers.reader import Reader, Steps
from inflight.door.gateway.parsers.tools import Schemas
from inflight.door.gateway.parsers.writer import Writer

_BEGIN = "<tool_call>"
_END = "</tool_call>"
# Models often close too few or too many braces.
_CLOSING = re.compile(r"[\s}]+")


def read(reader: Reader, writer: Writer, schemas: Schemas) -> Steps[None]:
    while (yield from reader.until((_BEGIN,), writer.text)):
        yield from reader.skip()
        call = JsonCall(reader, writer, None, end=_END)
        if not (yield from call.read()):
            writer.text(reader.recorded())
            continue
        yield from reader.skip(_CLOSING)
        if (yield from reader.accept(_END)):
            yield from reader.skip()


FORMAT = ToolFormat(
    name="hermes",
    read=read,
    templates=((_BEGIN, _END),),
    syntax=CallSyntax(
        before_name=f'{_BEGIN}\n{{"name": "',
        before_arguments='", "arguments": ',
        after=f"}}\n{_END}",
        separator="\n",
        trigger=_BEGIN,
    ),
    markers=(_BEGIN, _END),
)
