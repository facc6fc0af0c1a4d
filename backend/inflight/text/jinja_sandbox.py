"""The chat templates' sandbox: `python -m inflight.text.jinja_sandbox`.

A job is a template with messages, and the answer a text, or why there is none. The templates are
those of Hugging Face: Jinja's immutable sandbox, with the filters and variables that they expect.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
from typing import Any

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from inflight.errors import ConfigError, InflightError, RequestError
from inflight.sandbox.server import serve
from inflight.sandbox.worker import Work, allow_cpu
from inflight.text.template import (
    MAX_CHARACTERS,
    MAX_COMPILE_S,
    MAX_RENDER_S,
    MAX_TEMPLATE_CHARACTERS,
    Conversation,
    Refusal,
    Rendered,
    Rendering,
)

_KEPT_TEMPLATES = 16


class _Refused(Exception):
    """A template called raise_exception; its message is for the client."""


class _Environment(ImmutableSandboxedEnvironment):
    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
        )
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        del self.globals["lipsum"]


class _GenerationBlock(Extension):
    """`{% generation %}` marks assistant text for training; only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's interface

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render(rendering: Rendering) -> list[str]:
    """Render conversations with a template. Call it where it may crash the process.

    Raises:
        ConfigError: the template is not valid.
        RequestError: the template rejects the messages, fails on them, or writes too much.
        MemoryError: it needs too much memory.
    """
    template = _compile(rendering.template)
    moment = rendering.now or datetime.datetime.now()
    shared = {
        "bos_token": rendering.bos_token,
        "eos_token": rendering.eos_token,
        "strftime_now": moment.strftime,
    }
    return [_text(template, conversation, shared) for conversation in rendering.conversations]


def _text(template: jinja2.Template, conversation: Conversation, shared: dict[str, Any]) -> str:
    parts: list[str] = []
    length = 0
    variables = {
        "documents": None,
        **conversation.variables,
        "messages": conversation.messages,
        "tools": conversation.tools,
        "add_generation_prompt": conversation.add_generation_prompt,
        **shared,
    }
    allow_cpu(MAX_RENDER_S)
    try:
        for part in template.generate(variables):
            parts.append(part)
            length += len(part)
            if length > MAX_CHARACTERS:
                break
    except MemoryError:
        raise
    except _Refused as error:
        raise _error(f"rejected the messages: {error}") from None
    except Exception as error:
        # The error's text may quote the template, so only its type is reported.
        raise _error(f"failed on the messages ({type(error).__name__})") from None
    if length > MAX_CHARACTERS:
        raise _error(f"produces a text that is too long; allowed: {MAX_CHARACTERS} characters")
    return "".join(parts)


@functools.lru_cache(maxsize=_KEPT_TEMPLATES)
def _compile(template: str) -> jinja2.Template:
    if len(template) > MAX_TEMPLATE_CHARACTERS:
        raise ConfigError(
            f"chat template: {len(template)} characters; allowed: {MAX_TEMPLATE_CHARACTERS}"
        )
    allow_cpu(MAX_COMPILE_S)
    try:
        return _environment().from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"chat template: line {error.lineno}: {error.message}") from None
    except (RecursionError, SyntaxError, ValueError, jinja2.TemplateError) as error:
        raise ConfigError(f"chat template: not valid ({type(error).__name__})") from None


@functools.cache
def _environment() -> _Environment:
    return _Environment()


def _error(message: str) -> RequestError:
    return RequestError(f"the model's chat template {message}", "messages")


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


def _prepare(_: bytes) -> Work:
    # A worker cannot open files, so what Jinja imports late is imported here.
    for template in ("{{ messages[0]|tojson }}{{ strftime_now('%c') }}", "{{ ''.x.y }}"):
        with contextlib.suppress(RequestError):
            render(Rendering(template, [Conversation([{"role": "user", "content": ""}])]))
    allow_cpu(0)
    return _work


def _work(job: bytes) -> bytes:
    answer: Rendered | Refusal
    try:
        answer = Rendered(render(msgspec.msgpack.decode(job, type=Rendering)))
    except InflightError as error:
        answer = Refusal(error.kind, str(error))
    return msgspec.msgpack.encode(answer)


if __name__ == "__main__":
    serve(_prepare, keeps_workers=True)
