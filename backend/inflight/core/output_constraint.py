"""The constraint of a structured output, and the checks that need no compiler.

The names on the wire are TensorRT-LLM's: guided_decoding_guide_type and guided_decoding_guide.
"""

from __future__ import annotations

import re
from typing import Any, Literal, get_args

import msgspec

from inflight.core import json_schema
from inflight.errors import RequestError, did_you_mean

TYPE_FIELD = "guided_decoding_guide_type"
GUIDE_FIELD = "guided_decoding_guide"

Kind = Literal["json", "json_schema", "regex", "ebnf_grammar", "choice"]
KINDS: tuple[Kind, ...] = get_args(Kind)

MAX_GUIDE_BYTES = 64 * 1024
MAX_REPEAT = 10_000
"""The highest count in a repetition such as x{1,10000}."""

# A repetition count, after the alternatives that may hold literal braces: escapes, classes,
# strings. Possessive quantifiers and optional ends keep the match linear in the text.
_COUNT = re.compile(
    r'\\.|\[(?:\\.|[^\]\\])*+\]?|"(?:\\.|[^"\\])*+"?'
    r"|\{\s*+(\d++)\s*+(?:,\s*+(\d*+)\s*+)?\}",
    re.DOTALL,
)
_REGEX_COUNT = re.compile(r"\\.|\[(?:\\.|[^\]\\])*+\]?|\{(\d++)(?:,(\d*+))?\}", re.DOTALL)


class StructuredOutput(msgspec.Struct, frozen=True):
    """A constraint that the whole text of an output must match.

    Attributes:
        kind: `json`, any JSON object; `json_schema`, a value of a schema; `regex`, an expression
            in Rust's syntax; `ebnf_grammar`, a grammar in GBNF (`root ::= ...`) or in Lark's
            syntax (`start: ...`); `choice`, one of several strings.
        guide: the schema as JSON text, the expression, the grammar, or the strings as a JSON
            array; "" for `json`.

    Raises:
        RequestError: the kind is unknown, or the guide is missing, too long or not allowed.
    """

    kind: Kind
    guide: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise RequestError(
                f"{self.kind!r} is unknown; allowed: {', '.join(KINDS)}"
                f"{did_you_mean(str(self.kind), KINDS)}",
                TYPE_FIELD,
            )
        if self.kind == "json":
            if self.guide.strip():
                raise RequestError(
                    f"{TYPE_FIELD} json takes no guide: it allows any JSON object; use json_schema "
                    "with a schema",
                    GUIDE_FIELD,
                )
            return
        if not self.guide:
            raise RequestError(
                f"is missing; {TYPE_FIELD} {self.kind} needs one: {_EXAMPLES[self.kind]}",
                GUIDE_FIELD,
            )
        try:
            size = len(self.guide.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text has a lone surrogate at character {error.start}; "
                "allowed: Unicode that UTF-8 can write",
                GUIDE_FIELD,
            ) from None
        if size > MAX_GUIDE_BYTES:
            raise RequestError(f"{size} bytes; allowed: {MAX_GUIDE_BYTES} bytes", GUIDE_FIELD)

    def check(self) -> None:
        """Refuse a constraint whose errors are visible without compiling it.

        Linear in the guide, with clearer errors than a compiler's. What passes may still be refused
        by the `sandbox`.

        Raises:
            RequestError: naming the place in the guide and what is allowed.
        """
        try:
            match self.kind:
                case "json_schema":
                    json_schema.check(decode(self.guide), check_regex)
                case "regex":
                    check_regex(self.guide)
                case "ebnf_grammar":
                    _check_counts(_COUNT, self.guide)
                case "choice":
                    self.choices()
        except ValueError as error:
            raise RequestError(str(error), GUIDE_FIELD) from None

    def choices(self) -> list[str]:
        """The strings of a `choice`, each once, in order.

        Raises:
            ValueError: the guide is no array of strings.
        """
        found = decode(self.guide)
        if not (isinstance(found, list) and found and all(isinstance(text, str) for text in found)):
            raise ValueError(
                f"a choice is a JSON array of one or more strings: {_EXAMPLES['choice']}"
            )
        if "" in found:
            raise ValueError("a choice must not be empty")
        return list(dict.fromkeys(found))


_EXAMPLES: dict[Kind, str] = {
    "json": "",
    "json_schema": '{"type": "object"}',
    "regex": "[0-9]+",
    "ebnf_grammar": 'root ::= "yes" | "no"',
    "choice": '["yes", "no"]',
}


def parse(guide_type: str | None, guide: str | None) -> StructuredOutput | None:
    """The constraint given by two strings of a request; None if both are absent.

    Args:
        guide_type: one of KINDS; "" counts as absent, as some gateways write it.
        guide: see StructuredOutput; "" counts as absent.

    Raises:
        RequestError: naming the field and what is allowed.
    """
    if not guide_type:
        if guide:
            raise RequestError(
                f"is missing, but {GUIDE_FIELD} is set; allowed: {', '.join(KINDS)}", TYPE_FIELD
            )
        return None
    constraint = StructuredOutput(guide_type, guide or "")  # type: ignore[arg-type]  # checked in there
    constraint.check()
    return constraint


def decode(text: str) -> Any:
    """JSON text as Python values.

    Raises:
        ValueError: it is not JSON; says where.
    """
    try:
        return msgspec.json.decode(text)
    except RecursionError:
        raise ValueError(
            f"nested too deeply; allowed: {json_schema.MAX_DEPTH} objects and arrays"
        ) from None
    except msgspec.DecodeError as error:
        raise ValueError(f"not valid JSON: {error}") from None


def check_regex(expression: str) -> None:
    """Refuse excessive repetition counts; the compiler checks the rest of the syntax.

    Raises:
        ValueError: says what is allowed.
    """
    _check_counts(_REGEX_COUNT, expression)


def _check_counts(pattern: re.Pattern[str], text: str) -> None:
    for match in pattern.finditer(text):
        for count in match.groups():
            # By length first: Python refuses to read numbers of thousands of digits.
            if count and (len(count) > 9 or int(count) > MAX_REPEAT):
                shown = count if len(count) <= 12 else f"a number of {len(count)} digits"
                raise ValueError(f"a repetition of {shown} is too many; allowed: {MAX_REPEAT}")
