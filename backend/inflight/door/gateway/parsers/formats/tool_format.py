"""What defines a format of tool calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from inflight.door.gateway.parsers.reader import Reader, Steps
from inflight.door.gateway.parsers.tools import Schemas
from inflight.door.gateway.parsers.writer import Writer

Read = Callable[[Reader, Writer, Schemas], Steps[None]]
"""Reads an output up to its end; the schemas have all allowed names."""


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """The text around names and arguments, for grammars.

    Attributes:
        before_name, before_arguments, after: of one call.
        opening, separator, closing: of a sequence of calls.
        trigger: what `opening + before_name` starts with and no other text contains; "" if free
            text and calls cannot be distinguished by one marker.
    """

    before_name: str
    before_arguments: str
    after: str
    opening: str = ""
    separator: str = ""
    closing: str = ""
    trigger: str = ""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format of tool calls.

    Attributes:
        name: as in vLLM for most of those that it has.
        read: its parser.
        templates: a chat template that contains all texts of one of these uses the format.
        syntax: how guided calls are written; None if they are written in the format `json`.
        markers: texts that are tokens of their own in the models that use the format. Where they
            are special tokens, the text of an output has them on request alone.
        is_whole: it covers the whole output: reasoning, too, whose format has the same name, and
            which `read` finds without any schemas. Content never has its markers.
    """

    name: str
    read: Read
    templates: tuple[tuple[str, ...], ...] = ()
    syntax: CallSyntax | None = None
    markers: tuple[str, ...] = ()
    is_whole: bool = False
