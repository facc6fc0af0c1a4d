"""[f(city="Paris", days=3), g()], of Llama 4, Llama 3.2 and others.

Calls of known functions at the start of an output, or after <|python_start|>. Values are Python
literals, converted to JSON. A call begins with its first parameter or its closing parenthesis;
positional arguments are not supported.

https://www.llama.com/docs/model-cards-and-prompt-formats/llama4
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from inflight.door.gateway.parsers.formats.tool_format import ToolFormat
from inflight.door.gateway.parsers.json_call import MAX_NAME, read_rest
from inflight.door.gateway.parsers.python_literal import read_literal
from inflight.door.gateway.parsers.reader import Reader, Steps
from inflight.door.gateway.parsers.tools import Schemas
from inflight.door.gateway.parsers.writer import Writer

_START = "<|python_start|>"
_END = "<|python_end|>"
_NAME = re.compile(r"[\w.-]+")
_SEPARATORS = re.compile(r"[\s,]+")


def read(reader: Reader, writer: Writer, schemas: Schemas) -> Steps[None]:
    reader.record()
    yield from reader.skip()
    is_marked = yield from reader.accept(_START)
    while True:
        yield from reader.skip()
        if not (yield from _list(reader, writer, None if is_marked else schemas)):
            writer.text(reader.recorded())
        is_marked = bool((yield from reader.until((_START,), writer.text)))
        if not is_marked:
            return


def _list(reader: Reader, writer: Writer, names: Collection[str] | None) -> Steps[bool]:
    """Read a list of calls; False if it has none, or something else comes first."""
    if not (yield from reader.accept("[")):
        return False
    num_calls = 0
    while True:
        yield from reader.skip(_SEPARATORS)
        if num_calls and (yield from reader.accept("]")):
            break
        if num_calls:
            reader.record()
        if not (yield from _call(reader, writer, names)):
            if num_calls:
                writer.text(reader.recorded())
            return num_calls > 0
        num_calls += 1
    yield from reader.skip()
    if (yield from reader.accept(_END)):
        yield from reader.skip()
    return True


def _call(reader: Reader, writer: Writer, names: Collection[str] | None) -> Steps[bool]:
    """Read a call; False if it is none."""
    name = yield from reader.run(_NAME, MAX_NAME)
    if not name or (names is not None and name not in names):
        return False
    if not (yield from reader.accept("(")):
        return False
    num_parameters = 0
    while True:
        yield from reader.skip(_SEPARATORS)
        if (yield from reader.accept(")")):
            if not num_parameters:
                _begin(reader, writer, name)
            writer.arguments("}")
            return True
        key = yield from reader.run(_NAME, MAX_NAME)
        yield from reader.skip()
        is_parameter = key and (yield from reader.accept("="))
        if not is_parameter and not num_parameters:
            return False
        if not num_parameters:
            _begin(reader, writer, name)
        separator = ", " if num_parameters else ""
        num_parameters += 1
        if is_parameter:
            writer.arguments(f"{separator}{json.dumps(key)}: ")
            yield from reader.skip()
            if (yield from read_literal(reader, writer.arguments)):
                continue
        else:
            writer.arguments(f"{separator}{key}")
        yield from read_rest(reader, writer, "")
        return True


def _begin(reader: Reader, writer: Writer, name: str) -> None:
    reader.recorded()
    writer.begin(name)
    writer.arguments("{")


FORMAT = ToolFormat(
    name="pythonic",
    read=read,
    templates=(("func_name1(",), (_START,)),
    markers=(_START, _END),
)
