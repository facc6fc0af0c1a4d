"""Guides compiled by llguidance, and its limits while a request runs.

Two steps, for two processes. `source` rewrites a guide as a grammar of the library: Python code on
untrusted text, so it runs only in the sandbox. `Grammar` compiles that source, which the sandbox
has compiled before.
"""

from __future__ import annotations

import json
import re

import llguidance
import msgspec
from llguidance.gbnf_to_lark import any_to_lark

from inflight.core.output_constraint import StructuredOutput
from inflight.errors import EngineError

MAX_SOURCE_BYTES = 1 << 20

# The library's limits, tightened to the time of a step and the memory of a process. A lexer state
# takes 1-2 kB, and copies of a grammar share a lexer, so a grammar stays below some 40 MB;
# `matcher` starts a new lexer when it is full.
_LIMITS = llguidance.LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=1_000_000,  # about 20 ms
    step_lexer_fuel=50_000,  # about 4 ms
    step_max_items=4_000,  # about 10 ms; an object of 900 optional properties keeps to it
    max_lexer_states=20_000,
    max_grammar_size=200_000,
    verbose_errors=False,  # an error quotes no grammar and no output
)


class Grammar:
    """A compiled grammar, from which each sequence starts.

    Attributes:
        source: what was compiled.
        compile_s: compile time in the sandbox, in seconds.
        num_bytes: memory that it retains, as measured there.
        is_json: whether white space is insignificant in it, mostly.
        generation: number of times the lexer was renewed.
    """

    def __init__(
        self,
        tokenizer: llguidance.LLTokenizer,
        source: str,
        *,
        compile_s: float = 0.0,
        num_bytes: int = 0,
        is_json: bool = False,
    ) -> None:
        """Compile; only after the sandbox did, since the cost depends on the source.

        Raises:
            EngineError: the library rejects the source.
        """
        self.source = source
        self.compile_s = compile_s
        self.num_bytes = num_bytes
        self.is_json = is_json
        self.generation = 0
        self._tokenizer = tokenizer
        self._template = self._compile()

    def start(self) -> llguidance.LLMatcher:
        """The state before the first token; shares the lazily built lexer with all others."""
        return self._template.deep_copy()

    def renew(self) -> None:
        """Start a new lexer for states started from now on; older states keep theirs."""
        self._template = self._compile()
        self.generation += 1

    def _compile(self) -> llguidance.LLMatcher:
        matcher = compile_source(self._tokenizer, self.source)
        if matcher.is_error():
            raise EngineError(f"a grammar broke: {first_line(matcher.get_error())}")
        return matcher


def compile_source(tokenizer: llguidance.LLTokenizer, source: str) -> llguidance.LLMatcher:
    """The library's matcher for a source; check its `is_error`."""
    return llguidance.LLMatcher(tokenizer, source, log_level=0, limits=_LIMITS)


def source(constraint: StructuredOutput) -> str:
    """A guide as a grammar of the library.

    Raises:
        ValueError: the guide is not valid for its kind.
    """
    match constraint.kind:
        case "json":
            return _json_source({"type": "object"})
        case "json_schema":
            schema = json.loads(constraint.guide)
            return _json_source(schema if isinstance(schema, dict) else {})
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(_unanchored(constraint.guide))
        case "choice":
            # One expression is a single lexeme; alternatives of a grammar would be many.
            return llguidance.LLMatcher.grammar_from_regex(
                "|".join(_literal(text) for text in constraint.choices())
            )
        case "ebnf_grammar":
            return _lark(constraint.guide)


def first_line(error: str) -> str:
    """The library's error message, without the grammar and the state that it quotes."""
    found = re.search(r"^error: (.*)$", error, re.MULTILINE)
    text = found.group(1) if found else error.split("\n", 1)[0]
    return text if len(text) <= 300 else f"{text[:297]}..."


def _json_source(schema: dict[str, object]) -> str:
    # White space between the parts is unlimited here; `masks` bounds it.
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema, ensure_ascii=False))


def _unanchored(expression: str) -> str:
    """Strip ^ and $: the whole output has to match anyway, and the library has no anchors.

    In `^a|b$` each belongs to one branch only, which makes no difference here.
    """
    if expression.startswith("^"):
        expression = expression[1:]
    if expression.endswith("$"):
        body = expression[:-1]
        if (len(body) - len(body.rstrip("\\"))) % 2 == 0:
            expression = body
    return expression


_SYNTAX = frozenset("\\.+*?()|[]{}^$#&-~/\"'<>=!:%@,;` ")


def _literal(text: str) -> str:
    """An expression that matches a text."""
    return "".join(
        f"\\x{{{ord(char):x}}}" if char in _SYNTAX or not char.isprintable() else char
        for char in text
    )


_ESCAPE = re.compile(r"#[^\n]*|\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


def _lark(text: str) -> str:
    """A grammar in Lark's syntax, given in Lark's or GBNF's.

    Raises:
        ValueError: it is in neither.
    """

    def spell(match: re.Match[str]) -> str:
        # The converter drops zeros of \\u00e9, so it gets the character.
        code = match.group(1) or match.group(2)
        if code is None:
            return match.group()
        point = int(code, 16)
        if point > 0x10FFFF or 0xD800 <= point <= 0xDFFF:
            raise ValueError(f"{match.group()} is not a character")
        return f"\\x{point:02x}" if point < 0x80 else chr(point)

    is_gbnf = "::=" in text
    try:
        return str(any_to_lark(_ESCAPE.sub(spell, text) if is_gbnf else text))
    except RecursionError:
        raise ValueError("the grammar is nested too deeply") from None
    except ValueError:
        raise
    except Exception as error:  # the converter raises bare Exception
        raise ValueError(
            f"not a grammar in GBNF or Lark syntax: {first_line(str(error))}"
        ) from None


class Verdict(msgspec.Struct, frozen=True, tag="verdict"):
    """The sandbox's result for a guide.

    Attributes:
        source: what to compile; None if rejected.
        refusal: the reason, in one sentence.
        compile_s: compile time in seconds.
        step_s: the slowest step of the test walks, in seconds.
        num_bytes: memory retained afterwards.
    """

    source: str | None = None
    refusal: str = ""
    compile_s: float = 0.0
    step_s: float = 0.0
    num_bytes: int = 0
