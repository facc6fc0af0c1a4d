"""Grammars for tests, with a compiler and without one."""

from __future__ import annotations

import threading
import time

from inflight.core.output_constraint import Kind, StructuredOutput
from inflight.errors import InflightError
from inflight.structured import grammar as grammars
from inflight.structured.compiler import Compiler, Ticket
from inflight.structured.grammar import Grammar
from inflight.structured.vocabulary import Vocabulary


def wait(compiler: Compiler, *tickets: Ticket, timeout_s: float = 60.0) -> None:
    """Poll until these tickets are done."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while not all(ticket.done for ticket in tickets):
        assert time.monotonic() < deadline, "no verdict came"
        compiler.poll()
        pause.wait(0.001)


def compile_with(compiler: Compiler, kind: Kind, guide: str = "") -> Grammar:
    """A grammar, or the compiler's error."""
    ticket = compiler.submit(StructuredOutput(kind, guide))
    wait(compiler, ticket)
    if ticket.grammar is None:
        assert isinstance(ticket.error, InflightError)
        raise ticket.error
    return ticket.grammar


def compile_here(vocabulary: Vocabulary, kind: Kind, guide: str = "") -> Grammar:
    """A grammar compiled in this process, for guides that are known to be harmless."""
    source = grammars.source(StructuredOutput(kind, guide))
    is_json = kind in ("json", "json_schema")
    return Grammar(vocabulary.llguidance_tokenizer(), source, is_json=is_json)
