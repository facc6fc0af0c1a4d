"""<｜tool▁calls▁begin｜>..., of DeepSeek V3, R1 and V3.1.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f     V3, R1
    ```json
    {...}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜>...   V3.1

One parser reads both: in V3.1, arguments follow the separator.

https://huggingface.co/deepseek-ai/DeepSeek-V3.1
"""  # noqa: RUF002

from __future__ import annotations

import re

from inflight.door.gateway.parsers.formats.tool_format import CallSyntax, ToolFormat
from inflight.door.gateway.parsers.json_call import MAX_NAME, JsonCall
from inflight.door.gateway.parsers.reader import Reader, Steps
from inflight.door.gateway.parsers.tools import Schemas
from inflight.door.gateway.parsers.writer import Writer

_CALLS_BEGIN = "<\uff5ctool▁calls▁begin\uff5c>"
_CALLS_END = "<\uff5ctool▁calls▁end\uff5c>"
_CALL_BEGIN = "<\uff5ctool▁call▁begin\uff5c>"
_CALL_END = "<\uff5ctool▁call▁end\uff5c>"
_SEPARATOR = "<\uff5ctool▁sep\uff5c>"
_MARKERS = (_CALLS_BEGIN, _CALLS_END, _CALL_BEGIN, _CALL_END, _SEPARATOR)
_NAME = re.compile(r"[^<\s]+")
_CLOSING = re.compile(r"[\s`]+")


def read(reader: Reader, writer: Writer, schemas: Schemas) -> Steps[None]:
    while marker := (yield from reader.until((_CALLS_BEGIN, _CALL_BEGIN), writer.text)):
        if marker == _CALLS_BEGIN:
            yield from reader.skip()
            if not (yield from reader.accept(_CALL_BEGIN)):
                writer.text(reader.recorded())
                continue
        if not (yield from _call(reader, writer)):
            writer.text(reader.recorded())
            continue
        yield from reader.skip()
        if (yield from reader.accept(_CALLS_END)):
            yield from reader.skip()


def _call(reader: Reader, writer: Writer) -> Steps[bool]:
    """Read a call after its first marker; False if it is none."""
    name = yield from reader.run(_NAME, MAX_NAME)
    if not (yield from reader.accept(_SEPARATOR)):
        return False
    yield from reader.skip()
    if (yield from reader.peek()) != "{":
        # V3: what precedes the separator is the type of the tool.
        name = yield from reader.run(_NAME, MAX_NAME)
        yield from reader.skip()
        if (yield from reader.accept("```")):
            yield from reader.accept("json")
            yield from reader.skip()
    if not name or (yield from reader.peek()) != "{":
        return False
    call = JsonCall(reader, writer, None, end=_CALL_END)
    yield from call.begin(name)
    yield from reader.skip(_CLOSING)
    yield from reader.accept(_CALL_END)
    return True


V3 = ToolFormat(
    name="deepseek_v3",
    read=read,
    templates=((_CALL_BEGIN, "```json"),),
    syntax=CallSyntax(
        before_name=f"{_CALL_BEGIN}function{_SEPARATOR}",
        before_arguments="\n```json\n",
        after=f"\n```{_CALL_END}",
        opening=_CALLS_BEGIN,
        separator="\n",
        closing=_CALLS_END,
        trigger=_CALLS_BEGIN,
    ),
    markers=_MARKERS,
)

V31 = ToolFormat(
    name="deepseek_v31",
    read=read,
    templates=((_CALL_BEGIN,),),
    syntax=CallSyntax(
        before_name=_CALL_BEGIN,
        before_arguments=_SEPARATOR,
        after=_CALL_END,
        opening=_CALLS_BEGIN,
        closing=_CALLS_END,
        trigger=_CALLS_BEGIN,
    ),
    markers=_MARKERS,
)
