"""A grammar uses the bytes of each token as delivered to the client."""

import random

import numpy as np

from grammar_walk import Walker, allowed
from grammars import compile_here
from inflight.structured import bridge
from inflight.structured.grammar import Grammar
from inflight.structured.masks import MaskFiller
from inflight.structured.matcher import Matcher
from inflight.structured.vocabulary import Vocabulary
from inflight.text.detokenize import Detokenizer
from inflight.text.tokenizer import Tokenizer
from texts import TEXTS

ANYTHING = r"(.|\n)*"
NOTHING_BUT = "(wörter|日本|Hello, world|x y z|\t\\{\\}\\[\\]|😀)*"


def vocabulary_of(tokenizer: Tokenizer, padding: int = 40) -> Vocabulary:
    return bridge.vocabulary(tokenizer, tokenizer.vocab_size + padding, tokenizer.eos_ids)


def mask_of(vocabulary: Vocabulary, matcher: Matcher) -> set[int]:
    return set(allowed(Walker(vocabulary).mask(matcher)).tolist())


def test_tokens_are_the_detokenizer_s(tokenizer: Tokenizer) -> None:
    vocabulary = vocabulary_of(tokenizer)
    detokenizer = Detokenizer(tokenizer)
    assert vocabulary.size == tokenizer.vocab_size + 40
    assert vocabulary.num_words == -(-vocabulary.size // 32)
    assert vocabulary.num_used <= tokenizer.vocab_size
    for id_, text in enumerate(vocabulary.tokens):
        expected = tokenizer.special_ids.get(id_)
        assert text == (detokenizer.join([id_]) if expected is None else expected.encode())


def test_a_draft_model_samples_only_from_its_own_vocabulary(byte_level: Tokenizer) -> None:
    vocabulary = bridge.vocabulary(byte_level, 500, [3, 700, -1])
    assert (vocabulary.size, vocabulary.end_ids, vocabulary.special_ids) == (500, [3], [3])


def test_every_text_is_accepted_as_it_is_tokenized(tokenizer: Tokenizer) -> None:
    vocabulary = vocabulary_of(tokenizer)
    grammar = compile_here(vocabulary, "regex", ANYTHING)
    special = set(vocabulary.special_ids)
    checked = 0
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if special.isdisjoint(ids):
            assert Matcher(grammar, vocabulary).count_accepted(ids) == len(ids), text
            checked += 1
    assert checked > 50


def test_only_the_text_that_is_asked_for_comes_out(tokenizer: Tokenizer) -> None:
    """Whatever path is taken through the vocabulary, single bytes of a character included."""
    vocabulary = vocabulary_of(tokenizer)
    walker = Walker(vocabulary)
    grammar = compile_here(vocabulary, "regex", NOTHING_BUT)
    parts = {"wörter", "日本", "Hello, world", "x y z", "\t{}[]", "😀"}
    for seed in range(20):
        tokens, _ = walker.walk(Matcher(grammar, vocabulary), random.Random(seed), 30, 60)
        rest = Detokenizer(tokenizer).join(tokens).decode("utf-8", "ignore")
        while rest:
            part = next((p for p in parts if rest.startswith(p)), None)
            if part is None:
                assert any(p.startswith(rest) for p in parts), rest
                break
            rest = rest[len(part) :]


def test_special_tokens_and_padding_are_never_text(tokenizer: Tokenizer) -> None:
    vocabulary = vocabulary_of(tokenizer)
    matcher = Matcher(compile_here(vocabulary, "regex", ANYTHING), vocabulary)
    found = mask_of(vocabulary, matcher)
    assert found & set(vocabulary.special_ids) == set(vocabulary.end_ids)
    assert max(found) < vocabulary.num_used
    spelled = next(iter(tokenizer.special_ids.values()))
    literal = compile_here(vocabulary, "choice", f'["{spelled}"]')
    first = Matcher(literal, vocabulary)
    assert mask_of(vocabulary, first).isdisjoint(vocabulary.special_ids)
    body = next(i for i in mask_of(vocabulary, first) if len(vocabulary.tokens[i]) == 1)
    first.advance([body])  # it can be spelled, letter by letter


def test_padding_is_not_allowed_by_number_either(smollm: Tokenizer) -> None:
    vocabulary = vocabulary_of(smollm)
    library = vocabulary.llguidance_tokenizer()
    filler = MaskFiller(vocabulary)
    out = np.zeros((2, vocabulary.num_words), np.int32)
    matchers = [
        Matcher(Grammar(library, f"start: <[{ids}]>"), vocabulary)
        for ids in ("*", vocabulary.size - 1)
    ]
    failures = filler.fill(matchers, out)
    assert sorted(failures) == [1] and "neither another token" in str(failures[1])
    assert allowed(out[0]).max() == vocabulary.num_used - 1


def test_an_end_that_is_ordinary_text_is_not_a_special_token(byte_level: Tokenizer) -> None:
    """Checkpoints exist whose end of turn is an added token that is not marked special."""
    tool = byte_level.vocabulary()["<tool>"]
    assert tool not in byte_level.special_ids
    text = bridge.vocabulary(byte_level, byte_level.vocab_size, byte_level.eos_ids)
    end = bridge.vocabulary(byte_level, byte_level.vocab_size, [*byte_level.eos_ids, tool])
    for vocabulary, is_text in ((text, True), (end, False)):
        matcher = Matcher(compile_here(vocabulary, "regex", "x[^y]*"), vocabulary)
        matcher.advance(byte_level.encode("x", add_special_tokens=False))
        assert tool in mask_of(vocabulary, matcher)
        unfinished = Matcher(compile_here(vocabulary, "regex", "x[^y]*y"), vocabulary)
        unfinished.advance(byte_level.encode("x", add_special_tokens=False))
        assert (tool in mask_of(vocabulary, unfinished)) == is_text


def test_every_end_is_allowed_where_the_grammar_may_end(byte_level: Tokenizer) -> None:
    ends = sorted(byte_level.special_ids)[:3]
    vocabulary = bridge.vocabulary(byte_level, byte_level.vocab_size, ends)
    assert vocabulary.end_ids == ends
    matcher = Matcher(compile_here(vocabulary, "regex", "xx?"), vocabulary)
    x = byte_level.encode("x", add_special_tokens=False)
    assert mask_of(vocabulary, matcher).isdisjoint(ends)
    matcher.advance(x)
    assert mask_of(vocabulary, matcher) == {*ends, *x}
    matcher.advance(x)
    assert mask_of(vocabulary, matcher) == set(ends)


def test_a_model_without_ends_or_special_tokens_works() -> None:
    vocabulary = Vocabulary([bytes([i]) for i in range(128)] + [b""], [], [])
    matcher = Matcher(compile_here(vocabulary, "regex", "ab"), vocabulary)
    assert mask_of(vocabulary, matcher) == {ord("a")}
    matcher.advance([ord("a"), ord("b")])
    assert matcher.is_finished and matcher.may_end


class TestEncoder:
    def test_ids_are_those_of_a_text_within_a_text(self, tokenizer: Tokenizer) -> None:
        vocabulary = vocabulary_of(tokenizer)
        encode = bridge.encoder(tokenizer, vocabulary)
        fitting = 0
        for text in ['{"name": "', "Hello, world", "日本 wörter", " x", "\n\n", *TEXTS]:
            ids = encode(text)
            if ids:
                assert b"".join(vocabulary.tokens[i] for i in ids) == text.encode()
                fitting += 1
        assert fitting > 50

    def test_special_tokens_are_not_made_of_text(self, tokenizer: Tokenizer) -> None:
        vocabulary = vocabulary_of(tokenizer)
        for text in tokenizer.special_ids.values():
            assert bridge.encoder(tokenizer, vocabulary)(f"a {text} b") == []

    def test_forced_tokens_are_canonical_tokens(self, smollm: Tokenizer) -> None:
        vocabulary = vocabulary_of(smollm)
        library = vocabulary.llguidance_tokenizer(bridge.encoder(smollm, vocabulary))
        text = '{"temperature":21.5}'
        assert library.tokenize_str(text) == smollm.encode(text, add_special_tokens=False)
        assert np.array_equal(library.eos_tokens, vocabulary.end_ids)

    def test_a_text_that_has_to_come_is_encoded_once(self, smollm: Tokenizer) -> None:
        """Unless it is long: then keeping it would cost more than it saves."""
        vocabulary = vocabulary_of(smollm)
        encode = bridge.encoder(smollm, vocabulary)
        asked: list[str] = []

        def watched(text: str) -> list[int]:
            asked.append(text)
            return encode(text)

        library = vocabulary.llguidance_tokenizer(watched)
        for text, times in (("größe", 1), ("größe" * 100, 3)):
            asked.clear()
            expected = smollm.encode(text, add_special_tokens=False)
            assert [library.tokenize_str(text) for _ in range(3)] == [expected] * 3
            assert asked == [text] * times
