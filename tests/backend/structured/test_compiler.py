"""Grammars are compiled in the background, once for equal guides, and with limits."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from grammars import compile_with, wait
from inflight.core.output_constraint import StructuredOutput
from inflight.errors import CapacityError, EngineError, RequestError
from inflight.sandbox import process
from inflight.structured import compiler as compilers
from inflight.structured.compiler import Compiler
from inflight.structured.matcher import Matcher
from inflight.structured.vocabulary import Vocabulary
from inflight.text.tokenizer import Tokenizer

SLOW = StructuredOutput(
    "json_schema",
    json.dumps({"properties": {f"k{i}": {"type": "integer"} for i in range(900)}}),
)

MATCHES = {
    "json": ("", ['{"a": [1, {}]}', "{}"], ["[]", '{"a":}', "1"]),
    "json_schema": (
        '{"type": "array", "items": {"type": "integer"}, "maxItems": 2}',
        ["[]", "[1, -20]", "[\n  1\n]"],
        ["[1,2,3]", '["1"]', "[01]", "{}"],
    ),
    "regex": (r"^(ab|c)+\d{2}$", ["ab12", "abcab00"], ["ab1", "x", "ab123"]),
    "choice": (json.dumps(["ja", "nein", 'a"b\\c\n', "日本", "(x|y)*"]),
               ["ja", "nein", 'a"b\\c\n', "日本", "(x|y)*"], ["j", "janein", "x", "日"]),
    "ebnf_grammar": (
        'root ::= item ("," item)* # a list\nitem ::= [a-z]+ | "\\u00e9" | "\\x41"\n',
        ["ab,c", "é", "A,é"], ["", ",", "a,", "B"],
    ),
}  # fmt: skip


@pytest.fixture
def own(vocabulary: Vocabulary) -> Iterator[Compiler]:
    compiler = Compiler(vocabulary)
    yield compiler
    compiler.close()


@pytest.mark.parametrize("kind", MATCHES)
def test_every_kind_matches_what_it_should(
    kind: str, compiler: Compiler, vocabulary: Vocabulary, smollm: Tokenizer
) -> None:
    guide, good, bad = MATCHES[kind]
    grammar = compile_with(compiler, kind, guide)  # type: ignore[arg-type]
    (end,) = vocabulary.end_ids

    def matches(text: str) -> bool:
        ids = [*smollm.encode(text, add_special_tokens=False), end]
        return Matcher(grammar, vocabulary).count_accepted(ids) == len(ids)

    assert [text for text in good if not matches(text)] == []
    assert [text for text in bad if matches(text)] == []


def test_lark_is_an_ebnf_grammar_too(compiler: Compiler, vocabulary: Vocabulary) -> None:
    grammar = compile_with(compiler, "ebnf_grammar", 'start: "a" B\nB: /[0-9]+/')
    assert Matcher(grammar, vocabulary).forced() != []


@pytest.mark.alone
def test_submit_does_not_wait(own: Compiler) -> None:
    own.warm()
    started = time.perf_counter()
    tickets = [own.submit(SLOW), own.submit(StructuredOutput("json"))]
    assert time.perf_counter() - started < 0.02
    assert own.poll() == [] and own.num_waiting == 2
    wait(own, *tickets)
    assert own.num_waiting == 0


@pytest.mark.alone
def test_the_gil_is_released_meanwhile(own: Compiler) -> None:
    wait(own, own.submit(StructuredOutput("json")))
    ticket = own.submit(SLOW)
    longest, last = 0.0, time.perf_counter()
    while not ticket.done:
        own.poll()
        time.sleep(0)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    assert ticket.grammar is not None and ticket.grammar.compile_s > 0.03
    assert longest < ticket.grammar.compile_s / 2


def test_equal_guides_compile_once(own: Compiler) -> None:
    constraints = [StructuredOutput("regex", "[a-z]+")] * 5 + [StructuredOutput("choice", '["a"]')]
    tickets = [own.submit(constraint) for constraint in constraints]
    wait(own, *tickets)
    assert own.num_compiled == 2
    assert len({id(ticket.grammar) for ticket in tickets}) == 2
    again = own.submit(constraints[0])
    assert again.done and again.grammar is tickets[0].grammar
    assert own.poll() == []


def test_the_same_text_of_another_kind_is_another_guide(own: Compiler) -> None:
    tickets = [own.submit(StructuredOutput(kind, '["a"]')) for kind in ("regex", "choice")]
    wait(own, *tickets)
    assert own.num_compiled == 2


def test_each_ticket_is_polled_once(own: Compiler) -> None:
    first, second = (own.submit(StructuredOutput("regex", "a+")) for _ in range(2))
    found = []
    while len(found) < 2:
        found += own.poll()
    assert {id(ticket) for ticket in found} == {id(first), id(second)}
    assert own.poll() == []


def test_a_refusal_is_the_request_s_and_is_remembered(own: Compiler) -> None:
    constraint = StructuredOutput("regex", "(?<=a)b")
    ticket = own.submit(constraint)
    wait(own, ticket)
    assert isinstance(ticket.error, RequestError)
    assert str(ticket.error).startswith("guided_decoding_guide: look-around")
    assert ticket.error.param == "guided_decoding_guide"
    again = own.submit(constraint)
    assert again.done and again.error is not None and own.num_compiled == 1


def test_a_refusal_is_not_for_ever(vocabulary: Vocabulary) -> None:
    """It may be the fault of a machine that was busy."""
    now = 0.0
    compiler = Compiler(vocabulary, clock=lambda: now)
    try:
        constraint = StructuredOutput("regex", "(?<=a)b")
        wait(compiler, compiler.submit(constraint))
        now = 59.0
        assert compiler.submit(constraint).done
        now = 61.0
        ticket = compiler.submit(constraint)
        assert not ticket.done
        wait(compiler, ticket)
        assert compiler.num_compiled == 2
    finally:
        compiler.close()


def test_the_cache_stays_within_its_bound(vocabulary: Vocabulary) -> None:
    compiler = Compiler(vocabulary, cache_bytes=1 << 20)
    try:
        for number in range(40):
            compile_with(compiler, "regex", f"x{{{number}}}[a-z]+")
            assert compiler.cached_bytes <= 1 << 20
        assert compiler.num_compiled == 40
        compile_with(compiler, "regex", "x{39}[a-z]+")
        assert compiler.num_compiled == 40
        compile_with(compiler, "regex", "x{0}[a-z]+")
        assert compiler.num_compiled == 41
    finally:
        compiler.close()


def test_a_cancelled_ticket_is_not_polled(own: Compiler) -> None:
    slow = own.submit(SLOW)
    first, second = (own.submit(StructuredOutput("regex", "b+")) for _ in range(2))
    own.cancel(first)
    own.cancel(slow)
    own.cancel(slow)
    wait(own, second)
    assert not first.done and not slow.done
    abandoned = own.submit(StructuredOutput("regex", "c+"))
    own.cancel(abandoned)
    assert own.num_waiting == 0
    wait(own, own.submit(StructuredOutput("regex", "d+")))
    assert not abandoned.done


def test_killing_a_process_during_compilation_is_harmless(own: Compiler) -> None:
    wait(own, own.submit(StructuredOutput("json")))
    pid = own.sandbox_pid
    assert pid is not None
    ticket = own.submit(SLOW)
    time.sleep(0.05)
    os.killpg(pid, signal.SIGKILL)
    following = own.submit(StructuredOutput("regex", "[0-9]"))
    wait(own, ticket, following)
    assert ticket.grammar is not None and following.grammar is not None
    assert own.sandbox_pid not in (None, pid)


def test_a_child_that_never_lasts_fails_the_request_alone(
    own: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait(own, own.submit(StructuredOutput("json")))
    start = process.start_process

    def start_and_kill(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        child = start(*arguments, **options)
        child.kill()
        return child

    with monkeypatch.context() as patch:
        patch.setattr(process, "start_process", start_and_kill)
        own._sandbox.kill()
        ticket = own.submit(SLOW)
        wait(own, ticket)
    assert isinstance(ticket.error, EngineError)
    assert compile_with(own, "regex", "[0-9]") is not None


def test_too_many_guides_are_refused(own: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "MAX_WAITING", 2)
    tickets = [own.submit(StructuredOutput("regex", f"{letter}+")) for letter in "ab"]
    with pytest.raises(CapacityError, match="2 grammars are queued"):
        own.submit(StructuredOutput("regex", "c+"))
    tickets.append(own.submit(StructuredOutput("regex", "a+")))  # waits already
    wait(own, *tickets)


def test_wake_is_called_when_there_is_something_to_poll(vocabulary: Vocabulary) -> None:
    woken = threading.Event()
    compiler = Compiler(vocabulary, wake=woken.set)
    try:
        ticket = compiler.submit(StructuredOutput("json"))
        assert woken.wait(60)
        assert compiler.poll() == [ticket] and ticket.done
    finally:
        compiler.close()


@pytest.mark.alone
def test_closing_does_not_wait_for_a_guide(vocabulary: Vocabulary) -> None:
    compiler = Compiler(vocabulary)
    wait(compiler, compiler.submit(StructuredOutput("json")))
    compiler.submit(SLOW)
    started = time.perf_counter()
    compiler.close()
    assert time.perf_counter() - started < 0.5


def test_closing_an_unused_queue_is_fine(vocabulary: Vocabulary) -> None:
    Compiler(vocabulary).close()
