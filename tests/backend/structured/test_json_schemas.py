"""Any finished output is valid, whatever the model samples: seeded schemas, random tokens."""

import json
import random
from collections.abc import Iterable

import jsonschema
import pytest

from grammar_walk import Walker
from grammars import compile_with
from inflight.core.output_constraint import parse
from inflight.structured import bridge
from inflight.structured.compiler import Compiler
from inflight.structured.matcher import Matcher
from inflight.structured.vocabulary import Vocabulary
from inflight.text.tokenizer import Tokenizer
from json_schemas import schema

# Formats that the library and jsonschema read alike: the year 0000, for one, is a matter of taste.
FORMATS = jsonschema.FormatChecker(["uuid", "ipv4", "email"])


def check(compiler: Compiler, vocabulary: Vocabulary, seeds: Iterable[int]) -> tuple[int, int]:
    """How many outputs ended, of how many; each that did is valid."""
    walker = Walker(vocabulary)
    ended = total = 0
    for seed in seeds:
        value = schema(seed)
        constraint = parse("json_schema", json.dumps(value, ensure_ascii=False))
        assert constraint is not None
        grammar = compile_with(compiler, constraint.kind, constraint.guide)
        matcher = Matcher(grammar, vocabulary)
        tokens, finished = walker.walk(matcher, random.Random(seed))
        total += 1
        if finished:
            ended += 1
            output = json.loads(walker.text(tokens))
            jsonschema.Draft202012Validator(value, format_checker=FORMATS).validate(output)
    return ended, total


def test_schemas_are_kept(compiler: Compiler, vocabulary: Vocabulary) -> None:
    ended, total = check(compiler, vocabulary, range(150))
    assert ended >= 0.98 * total


def test_schemas_are_kept_by_other_vocabularies(
    byte_level: Tokenizer, sentencepiece: Tokenizer
) -> None:
    for tokenizer in (byte_level, sentencepiece):
        vocabulary = bridge.vocabulary(tokenizer, tokenizer.vocab_size + 5, tokenizer.eos_ids)
        compiler = Compiler(vocabulary, bridge.encoder(tokenizer, vocabulary))
        try:
            ended, total = check(compiler, vocabulary, range(40))
            assert ended >= 0.9 * total
        finally:
            compiler.close()


@pytest.mark.long
def test_a_thousand_schemas_are_kept(compiler: Compiler, vocabulary: Vocabulary) -> None:
    ended, total = check(compiler, vocabulary, range(1000))
    assert total == 1000 and ended >= 980
