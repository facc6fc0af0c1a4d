"""Chat templates, rendered as Hugging Face renders them, with resource limits.

A template comes with the model and never with a request, but it is still third-party code, so:

- it runs in Jinja's immutable sandbox: no unsafe attributes, no mutation of its arguments;
- its loops, macros and calls check a limit of MAX_SECONDS of this thread's CPU time;
- its output and every string or list that an operator builds are limited to MAX_CHARACTERS.

Not covered is a single call of a built-in filter or string method that is slow or large by itself,
such as a `replace` or a `format` that expands its input; most of those that pad a text to any width
are disabled. A model folder has to be trusted that far.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import threading
import time
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from inflight.errors import ConfigError, RequestError

MAX_CHARACTERS = 1 << 20
MAX_SECONDS = 0.5
MAX_TEMPLATE_CHARACTERS = 1 << 18
_PADDING = frozenset({"center", "expandtabs", "ljust", "rjust", "zfill"})
_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(\d{5,}|\*)")


class _Refused(Exception):
    """A template called raise_exception; its message is for the client."""


class _OutOfBounds(Exception):
    """A template exceeded a limit; the message says which."""


def render(
    template: str,
    messages: list[dict[str, str]],
    bos_token: str | None,
    eos_token: str | None,
    add_generation_prompt: bool = True,
    now: datetime.datetime | None = None,
) -> str:
    """Render messages with a chat template.

    Args:
        template: Jinja source.
        messages: objects with `role` and `content`.
        bos_token, eos_token: for the template; None is passed as "".
        add_generation_prompt: append the start of the assistant's turn.
        now: the time for `strftime_now`; None for the current time.

    Raises:
        ConfigError: the template is not valid.
        RequestError: the template rejects the messages, fails on them, or exceeds its limits.
    """
    compiled = _compile(template)
    environment = _environment()
    moment = now or datetime.datetime.now()
    parts: list[str] = []
    length = 0
    environment.start_clock()
    try:
        for part in compiled.generate(
            messages=messages,
            tools=None,
            documents=None,
            bos_token=bos_token or "",
            eos_token=eos_token or "",
            add_generation_prompt=add_generation_prompt,
            strftime_now=moment.strftime,
        ):
            parts.append(part)
            length += len(part)
            if length > MAX_CHARACTERS:
                raise _OutOfBounds(f"produces more than {MAX_CHARACTERS} characters")
            environment.tick()
    except _Refused as error:
        raise RequestError(
            f"the model's chat template rejected the messages: {error}", "messages"
        ) from None
    except _OutOfBounds as error:
        raise RequestError(f"the model's chat template {error}", "messages") from None
    except Exception as error:
        # The error's text may quote the template, so only its type is reported.
        raise RequestError(
            f"the model's chat template failed on the messages ({type(error).__name__})", "messages"
        ) from None
    return "".join(parts)


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja with limits on CPU time and on the results of operators."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
        )
        self._clock = threading.local()
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        del self.globals["lipsum"], self.filters["center"]

    def start_clock(self) -> None:
        self._clock.deadline = time.thread_time() + MAX_SECONDS

    def tick(self) -> str:
        """Raise if the time limit is exceeded; "" otherwise."""
        if time.thread_time() > self._clock.deadline:
            raise _OutOfBounds(f"takes more than {MAX_SECONDS} s of CPU time")
        return ""

    def bounded_concat(self, *values: Any) -> str:
        """Jinja's `~`."""
        text = "".join(map(str, values))
        _check_length(len(text))
        return text

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        if operator == "*" and isinstance(left, int) and not isinstance(right, int | float):
            left, right = right, left
        if operator == "*" and hasattr(left, "__len__") and isinstance(right, int):
            _check_length(len(left) * right)
        elif operator == "**" and not (abs(left) <= 1 << 32 and abs(right) <= 64):
            raise _OutOfBounds("computes a power that is too large")
        elif operator == "%" and isinstance(left, str) and _WIDE_FORMAT.search(left):
            raise _OutOfBounds("formats a field that is too wide")
        return _bounded(super().call_binop(context, operator, left, right))

    def call(
        __self,
        __context: jinja2.runtime.Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        __self.tick()
        return _bounded(super().call(__context, __obj, *args, **kwargs))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr in _PADDING:
            return False
        return super().is_safe_attribute(obj, attr, value)


class _Watch(NodeTransformer):
    """Adds a time check to every loop and macro, and maps `~` to a bounded function."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._watched(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._watched(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._watched(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._method("bounded_concat", node.nodes, node.lineno)

    def _watched(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        tick = nodes.ExprStmt(self._method("tick", [], node.lineno)).set_lineno(node.lineno)
        node.body.insert(0, tick)
        return node

    def _method(self, name: str, args: list[nodes.Expr], line: int) -> nodes.Call:
        method = nodes.EnvironmentAttribute(name)
        call = nodes.Call(method, args, [], None, None)
        call.set_lineno(line, override=True)
        return call


class _GenerationBlock(Extension):
    """`{% generation %}` marks assistant text for training; only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's interface

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.cache
def _environment() -> _Environment:
    return _Environment()


@functools.lru_cache(maxsize=16)
def _compile(template: str) -> jinja2.Template:
    if len(template) > MAX_TEMPLATE_CHARACTERS:
        raise ConfigError(
            f"chat template: {len(template)} characters; allowed: {MAX_TEMPLATE_CHARACTERS}"
        )
    try:
        environment = _environment()
        return environment.from_string(_Watch().visit(environment.parse(template)))
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"chat template: line {error.lineno}: {error.message}") from None
    except (RecursionError, SyntaxError, ValueError, jinja2.TemplateError) as error:
        raise ConfigError(f"chat template: not valid ({type(error).__name__})") from None


def _bounded(value: Any) -> Any:
    if isinstance(value, str | bytes | list | tuple):
        _check_length(len(value))
    return value


def _check_length(length: int) -> None:
    if length > MAX_CHARACTERS:
        raise _OutOfBounds(f"builds a value longer than {MAX_CHARACTERS}")


def _raise_exception(message: str) -> None:
    raise _Refused(str(message)[:500])


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's filter escapes it for HTML, which models are not trained on."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
