"""XML-like calls, of Qwen 3 Coder, Qwen 3.5 and others.

    <tool_call>
    <function=f>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

A value has no type: the parameter's schema decides whether `5` is a number or a string. One line
break after the opening tag of a value and one before its closing tag are no part of it. A call
begins with its first parameter, or with its end.

https://huggingface.co/Qwen/Qwen3-Coder-480B-A35B-Instruct
"""

from __future__ import annotations

import json
import re

from inflight.door.gateway.parsers.formats.tool_format import ToolFormat
from inflight.door.gateway.parsers.json_call import MAX_NAME, read_rest
from inflight.door.gateway.parsers.parameter_types import literal, types_of
from inflight.door.gateway.parsers.reader import Reader, Steps
from inflight.door.gateway.parsers.tools import Schema, Schemas
from inflight.door.gateway.parsers.writer import Writer

_CALL = "<tool_call>"
_CALL_END = "</tool_call>"
_FUNCTION = "<function="
_FUNCTION_END = "</function>"
_PARAMETER = "<parameter="
_NAME = re.compile(r"[^<>\s]+")
# Models leave out the last closing tag at times.
_VALUE_ENDS = (
    "\n</parameter>",
    "</parameter>",
    f"\n{_FUNCTION_END}\n{_CALL_END}",
)


def read(reader: Reader, writer: Writer, schemas: Schemas) -> Steps[None]:
    while marker := (yield from reader.until((_CALL, _FUNCTION), writer.text)):
        if marker == _CALL:
            yield from reader.skip()
        if marker == _CALL and not (yield from reader.accept(_FUNCTION)):
            writer.text(reader.recorded())
        elif (yield from _call(reader, writer, schemas)):
            yield from reader.skip()
            if (yield from reader.accept(_CALL_END)):
                yield from reader.skip()
        else:
            writer.text(reader.recorded())


def _call(reader: Reader, writer: Writer, schemas: Schemas) -> Steps[bool]:
    """Read a call after `<function=`; False if it is none."""
    name = yield from reader.run(_NAME, MAX_NAME)
    if not name or not (yield from reader.accept(">")):
        return False
    schema = schemas.get(name, {})
    num_parameters = 0
    while True:
        yield from reader.skip()
        if (yield from reader.accept(_PARAMETER)):
            key = yield from reader.run(_NAME, MAX_NAME)
            is_parameter = key and (yield from reader.accept(">"))
            if is_parameter:
                if not num_parameters:
                    _begin(reader, writer, name)
                writer.arguments(f"{', ' if num_parameters else ''}{json.dumps(key)}: ")
                num_parameters += 1
                if (yield from _value(reader, writer, key, schema)):
                    continue
                return True
            if num_parameters:
                writer.arguments(f"{_PARAMETER}{key}")
        elif (yield from reader.accept(_FUNCTION_END)):
            if not num_parameters:
                _begin(reader, writer, name)
            writer.arguments("}")
            return True
        if not num_parameters:
            return False
        yield from read_rest(reader, writer, _CALL_END)
        return True


def _begin(reader: Reader, writer: Writer, name: str) -> None:
    reader.recorded()
    writer.begin(name)
    writer.arguments("{")


def _value(reader: Reader, writer: Writer, key: str, schema: Schema) -> Steps[bool]:
    """Read a value, and pass it on as JSON; False if it was the last part of its call."""
    yield from reader.accept("\n")
    types = types_of(key, schema)
    if types == {"string"}:
        writer.arguments('"')
        end = yield from reader.until(
            _VALUE_ENDS, lambda part: writer.arguments(_escaped(part)), max_space=0
        )
        writer.arguments('"' if end else "")
    else:
        parts: list[str] = []
        end = yield from reader.until(_VALUE_ENDS, parts.append, max_space=0)
        text = "".join(parts)
        writer.arguments(literal(text, types) if end else text)
    reader.recorded()
    if end == _VALUE_ENDS[-1]:
        writer.arguments("}")
    return end in _VALUE_ENDS[:-1]


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


FORMAT = ToolFormat(
    name="qwen3_coder",
    read=read,
    templates=((_CALL, _FUNCTION, _PARAMETER),),
    markers=(_CALL, _CALL_END),
)
