"""The masks of a batch equal those of each sequence alone, even if one of them fails."""

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from grammar_walk import Walker, allowed
from grammars import compile_here
from inflight.core.output_constraint import Kind
from inflight.errors import EngineError
from inflight.structured import masks
from inflight.structured.grammar import Grammar
from inflight.structured.masks import MaskFiller
from inflight.structured.matcher import Matcher
from inflight.structured.vocabulary import Vocabulary
from inflight.text.tokenizer import Tokenizer

Started = Callable[..., list[Matcher]]

END = 2
GUIDES: list[tuple[Kind, str]] = [
    ("json", ""),
    ("regex", "[a-z ]{1,30}"),
    ("choice", '["yes", "no"]'),
    ("ebnf_grammar", 'root ::= "a" root "b" | "c"'),
]


@pytest.fixture(scope="module")
def filler(vocabulary: Vocabulary) -> MaskFiller:
    return MaskFiller(vocabulary)


def rows(vocabulary: Vocabulary, count: int) -> Any:
    return np.zeros((count, vocabulary.num_words), np.int32)


@pytest.fixture(scope="module")
def compiled(vocabulary: Vocabulary) -> list[Grammar]:
    return [compile_here(vocabulary, *guide) for guide in GUIDES]


@pytest.fixture(scope="module")
def walker(vocabulary: Vocabulary) -> Walker:
    return Walker(vocabulary)


@pytest.fixture
def started(vocabulary: Vocabulary, compiled: list[Grammar], walker: Walker) -> Started:
    """Makes matchers of several grammars, some tokens on their way."""

    def make(count: int, steps: int = 3) -> list[Matcher]:
        matchers = [Matcher(compiled[i % len(compiled)], vocabulary) for i in range(count)]
        for i, matcher in enumerate(matchers):
            walker.walk(matcher, random.Random(i), steps, max_steps=i % (steps + 1))
        return matchers

    return make


@pytest.mark.parametrize("count", [1, 2, 9])
def test_a_batch_is_its_rows_one_by_one(
    started: Started, filler: MaskFiller, vocabulary: Vocabulary, count: int
) -> None:
    matchers = started(count)
    together, alone = rows(vocabulary, count), rows(vocabulary, count)
    assert filler.fill(matchers, together) == {}
    for i, matcher in enumerate(matchers):
        assert filler.fill([matcher], alone[i : i + 1]) == {}
    assert np.array_equal(together, alone)
    assert all(row.any() for row in together)


def test_rows_past_the_batch_are_not_modified(
    started: Started, filler: MaskFiller, vocabulary: Vocabulary
) -> None:
    out = np.full((4, vocabulary.num_words), 77, np.int32)
    filler.fill(started(2), out)
    assert (out[2:] == 77).all() and not (out[:2] == 77).all()


def test_mask_bits_past_the_vocabulary_are_zero(
    started: Started, filler: MaskFiller, vocabulary: Vocabulary
) -> None:
    assert vocabulary.size % 32
    out = np.full((9, vocabulary.num_words), -1, np.int32)
    filler.fill(started(9), out)
    assert all(allowed(row).max() < vocabulary.num_used for row in out)


def test_no_sequences_no_masks(filler: MaskFiller, vocabulary: Vocabulary) -> None:
    assert filler.fill([], rows(vocabulary, 0)) == {}


@pytest.mark.parametrize(
    "wrong",
    [
        lambda n: np.zeros((2, n), np.int64),
        lambda n: np.zeros((2, n + 1), np.int32),
        lambda n: np.zeros((1, n), np.int32),
        lambda n: np.zeros((2, 2 * n), np.int32)[:, ::2],
        lambda n: np.zeros(2 * n, np.int32),
    ],
)
def test_a_wrong_array_is_refused(
    started: Started, filler: MaskFiller, vocabulary: Vocabulary, wrong: Any
) -> None:
    with pytest.raises(ValueError, match="it has to be int32, C-contiguous, of"):
        filler.fill(started(2), wrong(vocabulary.num_words))


@pytest.mark.parametrize("own_end", [False, True])
def test_rows_of_drafts_are_those_of_the_way_there(
    filler: MaskFiller,
    vocabulary: Vocabulary,
    smollm: Tokenizer,
    compiled: list[Grammar],
    walker: Walker,
    own_end: bool,
) -> None:
    comma = smollm.encode(",", add_special_tokens=False)[0]
    rng = random.Random(1)
    for _ in range(15):
        matchers = [
            Matcher(grammar, vocabulary, [END, comma] if own_end else None) for grammar in compiled
        ]
        drafts = []
        for i, matcher in enumerate(matchers):
            steps = rng.randrange(5)
            draft = walker.walk(matcher, rng, rng.randrange(4), max_steps=steps)[0] if steps else []
            matcher.rollback(len(draft))
            if i == 1 and draft:
                draft[rng.randrange(len(draft))] = comma  # does not fit
            drafts.append(draft)
        before = [matcher.num_tokens for matcher in matchers]
        out = rows(vocabulary, sum(len(draft) + 1 for draft in drafts))
        assert filler.fill(matchers, out, drafts) == {}
        assert [matcher.num_tokens for matcher in matchers] == before
        position = 0
        for matcher, draft in zip(matchers, drafts, strict=True):
            good = matcher.count_accepted(draft)
            for taken in range(len(draft) + 1):
                row = out[position + taken]
                if taken > good or (taken and draft[taken - 1] in matcher.end_ids):
                    # What stands there cannot count: the sampler only has to find something.
                    assert row.any()
                    continue
                matcher.advance(draft[:taken])
                assert np.array_equal(row, walker.mask(matcher)), (taken, draft)
                matcher.rollback(taken)
            position += len(draft) + 1


def test_successful_batches_are_not_retried_one_by_one(
    started: Started, filler: MaskFiller, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether there are drafts, in some sequences or in none."""
    matchers = started(4, steps=0)
    right, out = rows(vocabulary, 4), rows(vocabulary, 5)
    assert filler.fill(matchers, right) == {}

    def refuse(*given: object) -> None:
        raise AssertionError("one by one")

    monkeypatch.setattr(filler, "_fill_one", refuse)
    assert filler.fill(matchers, out, [[], [], [], []]) == {}
    assert np.array_equal(out[:4], right)
    draft = [int(allowed(right[2])[0])]
    assert filler.fill(matchers, out, [[], [], draft, []]) == {}
    assert np.array_equal(out[[0, 1, 2, 4]], right)


def test_a_sequence_that_ended_may_end_only(
    started: Started, filler: MaskFiller, vocabulary: Vocabulary, smollm: Tokenizer
) -> None:
    matchers = started(3, steps=0)
    matchers[2].advance([*smollm.encode("no", add_special_tokens=False), END])
    out = rows(vocabulary, 3)
    assert filler.fill(matchers, out) == {}
    assert allowed(out[2]).tolist() == [END]
    assert len(allowed(out[0])) and END not in allowed(out[0])


class Broken:
    """A state whose library panics."""

    def __getattr__(self, name: str) -> Any:
        raise SystemError("not a matcher")


def test_one_that_fails_fails_alone(
    started: Started, filler: MaskFiller, vocabulary: Vocabulary
) -> None:
    matchers = started(5)
    right = rows(vocabulary, 5)
    filler.fill(matchers, right)
    matchers[1].state.consume_token(vocabulary.size - 1)  # behind its back: now it is broken
    matchers[1]._recovered_at = matchers[1].num_tokens  # and beyond recovery
    matchers[4].state = Broken()  # type: ignore[assignment]
    out = rows(vocabulary, 5)
    failures = filler.fill(matchers, out)
    assert sorted(failures) == [1, 4]
    assert all(isinstance(error, EngineError) for error in failures.values())
    assert (out[[1, 4]] == -1).all()
    assert np.array_equal(out[[0, 2, 3]], right[[0, 2, 3]])


def test_one_that_can_recover_does(
    started: Started, filler: MaskFiller, vocabulary: Vocabulary
) -> None:
    matchers = started(4)
    right, out = rows(vocabulary, 4), rows(vocabulary, 4)
    filler.fill(matchers, right)
    matchers[1].state.consume_token(vocabulary.size - 1)
    assert filler.fill(matchers, out) == {}
    assert matchers[1].num_recoveries == 1
    assert np.array_equal(out, right)


def test_an_output_that_nothing_can_end_fails(
    filler: MaskFiller, vocabulary: Vocabulary, smollm: Tokenizer
) -> None:
    matcher = Matcher(compile_here(vocabulary, "choice", '["no"]'), vocabulary, end_ids=[])
    matcher.advance(smollm.encode("no", add_special_tokens=False))
    failures = filler.fill([matcher], rows(vocabulary, 1))
    assert "neither another token nor an end" in str(failures[0])


def test_a_slow_grammar_is_found_and_fails(
    started: Started, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the step after the slow one, so that a pause of the machine fails no sequence."""
    matchers = started(3, steps=0)
    filler = MaskFiller(vocabulary)
    right = rows(vocabulary, 3)
    monkeypatch.setattr(masks, "MAX_MASK_S", 0.0)
    assert filler.fill(matchers, right) == {}
    monkeypatch.setattr(masks, "MAX_MASK_S", 10.0)
    out = rows(vocabulary, 3)
    assert filler.fill(matchers, out) == {}
    assert np.array_equal(out, right)
    monkeypatch.setattr(masks, "MAX_MASK_S", 0.0)
    assert filler.fill(matchers, out) == {}
    failures = filler.fill(matchers, out)
    assert sorted(failures) == [0, 1, 2] and "a mask takes" in str(failures[0])


def test_many_masks_cost_no_more_than_one_slow_mask(
    started: Started, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    matchers = started(9)
    filler = MaskFiller(vocabulary)
    clock = iter(np.arange(100) * 0.9 * masks.MAX_MASK_S)
    monkeypatch.setattr(masks.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(masks.time, "thread_time", lambda: pytest.fail("looked for a slow one"))
    for _ in range(2):
        assert filler.fill(matchers, rows(vocabulary, 9)) == {}


def test_white_space_in_json_comes_to_an_end(
    filler: MaskFiller, vocabulary: Vocabulary, smollm: Tokenizer
) -> None:
    matcher = Matcher(compile_here(vocabulary, "json", ""), vocabulary)
    space = smollm.encode(" ", add_special_tokens=False)[0]
    quote = smollm.encode('"', add_special_tokens=False)[0]
    matcher.advance(smollm.encode("{", add_special_tokens=False))
    out = rows(vocabulary, 1)
    for taken in range(masks.MAX_WHITESPACE_BYTES + 1):
        assert filler.fill([matcher], out) == {}
        found = set(allowed(out[0]).tolist())
        assert quote in found
        assert (space in found) == (taken < masks.MAX_WHITESPACE_BYTES)
        matcher.advance([space])
    matcher.rollback(2)
    filler.fill([matcher], out)
    assert space in allowed(out[0])


@pytest.mark.parametrize("taken", [0, 1, masks.MAX_WHITESPACE_BYTES])
def test_white_space_in_drafts_comes_to_the_same_end(
    filler: MaskFiller, vocabulary: Vocabulary, smollm: Tokenizer, taken: int
) -> None:
    """Otherwise an output would depend on its drafts."""
    matcher = Matcher(compile_here(vocabulary, "json", ""), vocabulary)
    space, quote, brace = (smollm.encode(one, add_special_tokens=False)[0] for one in ' "{')
    matcher.advance([brace, *[space] * taken])
    draft = [space] * (masks.MAX_WHITESPACE_BYTES - taken) + [quote, space]
    out, alone = rows(vocabulary, 1 + len(draft)), rows(vocabulary, 1)
    assert filler.fill([matcher], out, [draft]) == {}
    for count, row in enumerate(out):
        assert filler.fill([matcher], alone) == {}
        assert np.array_equal(row, alone[0]), f"after {count} drafts"
        matcher.advance(draft[count : count + 1])


def test_required_whitespace_is_allowed(
    filler: MaskFiller, vocabulary: Vocabulary, smollm: Tokenizer
) -> None:
    guide = json.dumps({"const": "a" + " " * 200 + "b"})
    matcher = Matcher(compile_here(vocabulary, "json_schema", guide), vocabulary)
    space = smollm.encode(" ", add_special_tokens=False)[0]
    matcher.advance([smollm.encode(letter, add_special_tokens=False)[0] for letter in '"a'])
    out = rows(vocabulary, 1)
    for _ in range(200):
        assert filler.fill([matcher], out) == {} and out.any()
        matcher.advance([space])
