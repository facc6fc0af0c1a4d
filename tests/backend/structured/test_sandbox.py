"""Malicious guides are rejected, or harmless, within a second."""

import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from inflight.core.output_constraint import Kind, StructuredOutput
from inflight.structured.sandbox import Sandbox, SandboxLost
from inflight.structured.vocabulary import Vocabulary

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def sandbox(vocabulary: Vocabulary) -> Iterator[Sandbox]:
    sandbox = Sandbox(vocabulary)
    sandbox.start()
    yield sandbox
    sandbox.close()


def deep(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        found = {"type": "object", "properties": {"a": found}, "required": ["a"]}
    return found


def many_properties(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"k{i}": {"type": "integer"} for i in range(count)}}


def lark_choices(count: int) -> str:
    rules = [f"X{i}: /[a-z]*{i}/" for i in range(count)]
    return "\n".join([f"start: {' | '.join(f'X{i}' for i in range(count))}", *rules])


REFUSED: list[tuple[str, Kind, Any, str]] = [
    ("counted repetition", "regex", "x{1,100000}", "a repetition of 100000"),
    ("nested counts", "regex", "((((a{1,100}){1,100}){1,100}){1,100})", "too complex after"),
    ("look-behind", "regex", "(?<=a)b", "look-around"),
    ("look-ahead", "regex", "(?!a)b", "look-around"),
    ("back-reference", "regex", r"(a)\1", "backreferences are not supported"),
    ("30k parentheses", "regex", "(" * 30_000 + "a" + ")" * 30_000, "nest"),
    ("30k open parentheses", "regex", "(" * 30_000, "nest|unclosed"),
    ("states without end", "regex", "(.*a.{50}|.*b.{60}|.*ab.{70})*", "too complex after"),
    ("30k parentheses", "ebnf_grammar", "start: " + "(" * 30_000 + '"a"' + ")" * 30_000, "nest"),
    ("30k parentheses", "ebnf_grammar", "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000, "nest"),
    ("endless recursion", "ebnf_grammar", "start: start", "nothing can match it from the start"),
    ("endless recursion", "ebnf_grammar", "root ::= a\na ::= b\nb ::= a", "nothing can match it"),
    ("no start", "ebnf_grammar", 'a ::= "a"', "No 'root' rule"),
    ("unknown rule", "ebnf_grammar", "root ::= nope", "'nope' not found"),
    ("no grammar at all", "ebnf_grammar", "\x00\x01", "not a grammar|lexer"),
    ("no grammar at all", "ebnf_grammar", '{"grammars": []}', ""),
    ("import of a file", "ebnf_grammar", '%import "/etc/passwd"\nstart: "a"', ""),
    ("many lexemes", "json_schema", many_properties(2000), "too complex from .*Too many items"),
    ("depth", "json_schema", '{"properties": {"a":' * 999 + "{}" + "}}" * 999, "nested too deep"),
    ("depth", "json_schema", deep(60), "nested too deeply"),
    ("minItems", "json_schema", {"type": "array", "minItems": 10**9}, "more than an output"),
    ("$ref to itself", "json_schema", {"$ref": "#"}, "no end"),
    ("$ref to a file", "json_schema", {"$ref": "file:///etc/passwd"}, "nothing is fetched"),
    ("$ref to a host", "json_schema", {"$ref": "http://localhost/x"}, "nothing is fetched"),
    ("pattern", "json_schema", {"type": "string", "pattern": "^(a+)+b{1,100000}$"}, "repetition"),
    ("product of branches", "json_schema", {"allOf": [{"anyOf": [
        {"properties": {f"p{i}": {"const": j}}} for j in range(4)]} for i in range(12)]}, "large"),
    ("multipleOf", "json_schema", {"type": "integer", "multipleOf": 999_999_937}, "fuel|too"),
    ("wrong type", "json_schema", {"type": 5}, "type must be a string"),
    ("contradiction", "json_schema", {"type": "integer", "minimum": 5, "maximum": 3},
     "nsatisfiable|minimum"),
    ("unknown keyword", "json_schema", {"type": "array", "uniqueItems": True}, "uniqueItems"),
]  # fmt: skip

HARMLESS: list[tuple[str, Kind, Any]] = [
    ("nested repetition", "regex", "(a+)+b"),
    ("exponential automaton", "regex", "(a|b)*a(a|b){30}c"),
    ("long window", "regex", ".*a.{200}"),
    ("word counts", "regex", r"(\w{1,500} ){1,50}"),
    ("complement", "ebnf_grammar", "start: A\nA: ~/(a|b)*a(a|b){18}c/"),
    ("intersection", "ebnf_grammar", "start: A\nA: /(a|b)*a(a|b){12}/ & /(a|b)*b(a|b){13}/"),
    ("left recursion", "ebnf_grammar", 'root ::= root "a" | "a"'),
    ("ambiguity", "ebnf_grammar", 'root ::= s\ns ::= s s | "a" | "b" | "ab" | "ba"'),
    ("nested stars", "ebnf_grammar", 'start: (("a"*)*)* "b"'),
    ("many alternatives", "ebnf_grammar", lark_choices(300)),
    ("large enum", "json_schema", {"enum": [f"v{i}" for i in range(5_000)]}),
    ("10k enum", "json_schema", {"enum": list(range(10_000))}),
    ("depth", "json_schema", deep(45)),
    ("maxItems", "json_schema", {"type": "array", "items": {"type": "null"}, "maxItems": 10**9}),
    ("maxLength", "json_schema", {"type": "string", "maxLength": 10**9}),
    ("4k choices", "choice", [f"choice {i}" for i in range(4_000)]),
]


def constraint_of(kind: Kind, guide: Any) -> StructuredOutput:
    return StructuredOutput(kind, guide if isinstance(guide, str) else json.dumps(guide))


def ids(table: Any) -> list[str]:
    return [f"{row[1]}: {row[0]}" for row in table]


@pytest.mark.parametrize(("name", "kind", "guide", "message"), REFUSED, ids=ids(REFUSED))
def test_it_is_refused_within_a_second(
    sandbox: Sandbox, name: str, kind: Kind, guide: Any, message: str
) -> None:
    started = time.monotonic()
    verdict = sandbox.examine(constraint_of(kind, guide))
    assert time.monotonic() - started < 1.3
    assert verdict.source is None
    assert re.search(message, verdict.refusal), verdict.refusal
    assert 0 < len(verdict.refusal) < 400 and "\n" not in verdict.refusal


@pytest.mark.parametrize(("name", "kind", "guide"), HARMLESS, ids=ids(HARMLESS))
def test_it_costs_no_more_than_others(
    sandbox: Sandbox, vocabulary: Vocabulary, name: str, kind: Kind, guide: Any
) -> None:
    """What passes compiles at once and stays small; `test_matcher` has what comes of its use."""
    verdict = sandbox.examine(constraint_of(kind, guide))
    assert verdict.source is not None, verdict.refusal
    assert verdict.compile_s < 0.5
    assert verdict.num_bytes < 32 << 20


def test_the_sandbox_survives_them_all(vocabulary: Vocabulary) -> None:
    sandbox = Sandbox(vocabulary)
    try:
        sandbox.start()
        pid = sandbox.pid
        for _, kind, guide, _ in random.Random(0).sample(REFUSED, 12):
            sandbox.examine(constraint_of(kind, guide))
        assert sandbox.pid == pid
        assert sandbox.examine(StructuredOutput("regex", "[a-z]+")).source is not None
    finally:
        sandbox.close()


def test_time_is_limited(vocabulary: Vocabulary) -> None:
    slow = constraint_of(
        "json_schema", {"properties": {f"k{i}": {"type": "integer"} for i in range(1500)}}
    )
    sandbox = Sandbox(vocabulary, time_limit_s=0.05)
    try:
        sandbox.start()
        started = time.monotonic()
        verdict = sandbox.examine(slow)
        assert time.monotonic() - started < 0.5
        assert verdict.refusal == "too complex: it does not compile within 0.05 s"
        assert sandbox.examine(StructuredOutput("regex", "[a-z]+")).source is not None
    finally:
        sandbox.close()


def test_memory_is_limited(vocabulary: Vocabulary) -> None:
    large = constraint_of("json_schema", many_properties(1500))
    sandbox = Sandbox(vocabulary, memory_limit=8 << 20)
    try:
        verdict = sandbox.examine(large)
        assert verdict.refusal == "too large: it does not compile within 8 MiB of memory"
        assert sandbox.examine(StructuredOutput("choice", '["a"]')).refusal == ""
    finally:
        sandbox.close()


def test_a_killed_process_is_replaced(vocabulary: Vocabulary) -> None:
    slow = constraint_of(
        "json_schema", {"properties": {f"k{i}": {"type": "integer"} for i in range(1500)}}
    )
    sandbox = Sandbox(vocabulary)
    try:
        sandbox.start()
        pid = sandbox.pid
        threading.Timer(0.05, sandbox.kill).start()
        with pytest.raises(SandboxLost):
            sandbox.examine(slow)
        assert sandbox.examine(StructuredOutput("regex", "[a-z]+")).source is not None
        assert sandbox.pid not in (None, pid)
    finally:
        sandbox.close()


def test_a_process_that_hangs_is_killed(vocabulary: Vocabulary) -> None:
    sandbox = Sandbox(vocabulary, time_limit_s=0.1)
    try:
        sandbox.start()
        assert sandbox.pid is not None
        os.kill(sandbox.pid, signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(SandboxLost):
            sandbox.examine(StructuredOutput("regex", "[a-z]+"))
        assert time.monotonic() - started < 2.0
        assert sandbox.pid is None
    finally:
        sandbox.close()


def test_nothing_is_left_behind(vocabulary: Vocabulary) -> None:
    sandbox = Sandbox(vocabulary)
    sandbox.start()
    assert sandbox.pid is not None
    process = psutil.Process(sandbox.pid)
    sandbox.close()
    assert not process.is_running()


def test_it_ends_with_its_owner(vocabulary: Vocabulary) -> None:
    """As it does when an engine is killed: the pipe to its stdin closes."""
    sandbox = Sandbox(vocabulary)
    sandbox.start()
    process = sandbox._process
    assert process is not None and process.stdin is not None
    process.stdin.close()
    assert process.wait(timeout=5) == 0
    sandbox.close()
