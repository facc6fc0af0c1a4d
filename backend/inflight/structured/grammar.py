"""What llguidance makes of a guide, and the limits it keeps to while a request runs.

Two steps, because they belong to two processes. `source` rewrites a guide as a grammar of the
library's: Python code of ours and of the library's on a stranger's text, so it runs in the sandbox
only. `Grammar` compiles that source, which the sandbox has done before.
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

# The library's own, tightened to what a step of a batch can bear and a process can hold. A lexer
# state takes 1-2 kB, and copies of a grammar share a lexer, so a grammar stays below some 40 MB;
# `matcher` starts a lexer anew when it is full.
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
        compile_s: seconds it took in the sandbox.
        num_bytes: memory that it holds, as measured there.
        is_json: whether white space is only a matter of looks in it, mostly.
        generation: how often it took a new lexer.
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
        """Compile. Let the sandbox do it first: this costs what the source costs.

        Raises:
            EngineError: the library refuses the source.
        """
        self.source = source
        self.compile_s = compile_s
        self.num_bytes = num_bytes
        self.is_json = is_json
        self.generation = 0
        self._tokenizer = tokenizer
        self._template = self._compile()

    def start(self) -> llguidance.LLMatcher:
        """The state before the first token. Shares the lexer, which learns, with all others."""
        return self._template.deep_copy()

    def renew(self) -> None:
        """Take a new lexer, for states that start from now on; older ones keep theirs."""
        self._template = self._compile()
        self.generation += 1

    def _compile(self) -> llguidance.LLMatcher:
        matcher = compile_source(self._tokenizer, self.source)
        if matcher.is_error():
            raise EngineError(f"a grammar broke: {first_line(matcher.get_error())}")
        return matcher


def compile_source(tokenizer: llguidance.LLTokenizer, source: str) -> llguidance.LLMatcher:
    """The library's state machine of a source; `is_error` says whether it is one."""
    return llguidance.LLMatcher(tokenizer, source, log_level=0, limits=_LIMITS)


def source(constraint: StructuredOutput) -> str:
    """A guide in the library's terms.

    Raises:
        ValueError: it is not what its kind says.
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
            # One expression, one lexeme: as alternatives of a grammar they would be many.
            return llguidance.LLMatcher.grammar_from_regex(
                "|".join(_literal(text) for text in constraint.choices())
            )
        case "ebnf_grammar":
            return _lark(constraint.guide)


def first_line(error: str) -> str:
    """What the library says of an error, without the grammar and the state that it quotes."""
    found = re.search(r"^error: (.*)$", error, re.MULTILINE)
    text = found.group(1) if found else error.split("\n", 1)[0]
    return text if len(text) <= 300 else f"{text[:297]}..."


def _json_source(schema: dict[str, object]) -> str:
    # White space is free between the parts: `masks` keeps it from going on for ever.
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema, ensure_ascii=False))


def _unanchored(expression: str) -> str:
    """Without ^ and $ around it: the whole output has to match anyway, and the library knows none.

    In `^a|b$` each belongs to one branch only, which comes to the same.
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
    """A grammar in Lark's syntax, from there or from GBNF.

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
    """What the sandbox found out about a guide.

    Attributes:
        source: what to compile; None if it is refused.
        refusal: why, in one sentence.
        compile_s: seconds of the compilation.
        step_s: the slowest step of the walks that tried it.
        num_bytes: memory that it held afterwards.
    """

    source: str | None = None
    refusal: str = ""
    compile_s: float = 0.0
    step_s: float = 0.0
    num_bytes: int = 0
