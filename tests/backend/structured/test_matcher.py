"""A matcher accepts what its grammar allows, can roll back, and fails in isolation."""

import functools
import random
from collections.abc import Callable
from typing import Any

import llguidance
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grammar_walk import Walker, allowed
from grammars import compile_here
from inflight.core.output_constraint import Kind
from inflight.errors import EngineError
from inflight.structured import grammar as grammars
from inflight.structured.grammar import Grammar
from inflight.structured.matcher import Matcher, guarded
from inflight.structured.vocabulary import Vocabulary
from inflight.text.tokenizer import Tokenizer

END = 2
GRAMMARS: list[tuple[Kind, str]] = [
    ("json", ""),
    ("json_schema", '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}, '
     '"n": {"type": "integer", "minimum": 10, "maximum": 500}}, "required": ["name"]}'),
    ("regex", "(ab|abc|[0-9]{2,4})*x?"),
    ("choice", '["yes", "yes, of course", "no", "日本語"]'),
    ("ebnf_grammar", 'root ::= "(" root ")" root | [a-z]*'),
]  # fmt: skip


class Fixed:
    """What the tests share."""

    def __init__(self, vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
        self.vocabulary = vocabulary
        self.walker = Walker(vocabulary)
        self.ids = functools.partial(tokenizer.encode, add_special_tokens=False)
        self.grammar = functools.cache(functools.partial(compile_here, vocabulary))

    def start(self, kind: Kind, guide: str, **changes: Any) -> Matcher:
        return Matcher(self.grammar(kind, guide), self.vocabulary, **changes)


@pytest.fixture(scope="module")
def fixed(vocabulary: Vocabulary, smollm: Tokenizer) -> Fixed:
    return Fixed(vocabulary, smollm)


@pytest.mark.parametrize(("kind", "guide"), GRAMMARS)
@given(data=st.data())
@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_rolled_back_is_never_taken(fixed: Fixed, kind: Kind, guide: str, data: Any) -> None:
    """advance, rollback, advance: the masks are those of a matcher that went there straight."""
    rng = random.Random(data.draw(st.integers(0, 10**9)))
    matcher = fixed.start(kind, guide)
    masks = [fixed.walker.mask(matcher)]
    taken: list[int] = []
    for _ in range(data.draw(st.integers(1, 6))):
        for _ in range(rng.randint(1, 6)):
            ids = allowed(masks[-1])
            token = int(ids[rng.randrange(len(ids))])
            matcher.advance([token])
            taken.append(token)
            masks.append(fixed.walker.mask(matcher))
            if token == END:
                break
        back = rng.randint(0, len(taken))
        matcher.rollback(back)
        del taken[len(taken) - back :]
        del masks[len(masks) - back :]
        assert matcher.num_tokens == len(taken)
        assert np.array_equal(fixed.walker.mask(matcher), masks[-1])
        if matcher.has_ended:
            break
    straight = fixed.start(kind, guide)
    straight.advance(taken)
    assert np.array_equal(fixed.walker.mask(straight), masks[-1])
    assert straight.may_end == matcher.may_end
    assert straight.is_finished == matcher.is_finished


def test_white_space_is_counted_from_the_end(fixed: Fixed) -> None:
    matcher = fixed.start("json", "")

    def taken(*texts: str) -> int:
        matcher.advance([id_ for text in texts for id_ in fixed.ids(text)])
        return matcher.num_whitespace_bytes

    assert matcher.num_whitespace_bytes == 0
    assert taken("{") == 0
    assert taken(" ", "\n") == 2
    assert taken("  ") == 4
    assert taken('"', "a") == 0
    assert taken(" ") == 1
    matcher.rollback(3)
    assert matcher.num_whitespace_bytes == 4
    matcher.rollback(1)
    assert matcher.num_whitespace_bytes == 2
    assert taken("}") == 0
    matcher.advance([END])
    matcher.rollback(2)
    assert matcher.num_whitespace_bytes == 2
    matcher.rollback(matcher.num_tokens)
    assert matcher.num_whitespace_bytes == 0


@pytest.mark.parametrize(("kind", "guide"), GRAMMARS)
def test_the_mask_matches_the_accepted_tokens(fixed: Fixed, kind: Kind, guide: str) -> None:
    """Each token that is allowed is accepted. Of the others, none that is not forced otherwise."""
    rng = random.Random(0)
    matcher = fixed.start(kind, guide)
    for _ in range(15):
        ids = allowed(fixed.walker.mask(matcher))
        for token in rng.sample(ids.tolist(), min(20, len(ids))):
            assert matcher.count_accepted([token]) == 1
        assert (END in ids) == matcher.may_end
        if matcher.forced() == []:
            others = np.setdiff1d(np.arange(fixed.vocabulary.size), ids)
            for token in rng.sample(others.tolist(), min(20, len(others))):
                assert matcher.count_accepted([token]) == 0
        token = int(ids[rng.randrange(len(ids))])
        if token == END:
            break
        matcher.advance([token])


def test_drafts_are_accepted_up_to_the_first_mismatch(fixed: Fixed) -> None:
    matcher = fixed.start("regex", "ab|abc")
    a, b, c = (fixed.ids(letter)[0] for letter in "abc")
    cases: list[tuple[list[int], int]] = [
        ([], 0), ([a], 1), ([a, b], 2), ([a, b, END], 3), ([a, b, c], 3), ([a, b, c, END], 4),
        ([a, b, c, END, a], 4), ([a, b, c, c], 3), ([a, c, b], 1), ([END], 0), ([a, END], 1),
        ([b], 0), ([-1], 0), ([10**9], 0), ([a, b, 10**9], 2), ([a, fixed.vocabulary.size - 1], 1),
    ]  # fmt: skip
    for draft, accepted in cases:
        assert matcher.count_accepted(draft) == accepted, draft
    assert matcher.num_tokens == 0
    matcher.advance([a, b])
    assert [matcher.count_accepted(d) for d in ([END], [c, END], [END, c], [a])] == [1, 2, 1, 0]
    matcher.advance([c])
    assert matcher.is_finished
    assert [matcher.count_accepted(d) for d in ([END], [END, END], [a], [c, END])] == [1, 1, 0, 0]
    matcher.advance([END])
    assert matcher.has_ended and matcher.count_accepted([END]) == 0
    matcher.rollback(2)
    assert matcher.count_accepted([c, END]) == 2


def test_where_it_may_end(fixed: Fixed) -> None:
    matcher = fixed.start("regex", "ab|abc")
    found = []
    for letter in "abc":
        matcher.advance(fixed.ids(letter))
        found.append((matcher.may_end, matcher.is_finished))
    assert found == [(False, False), (True, False), (True, True)]


@pytest.mark.parametrize("tokens", ["b", "ac", "abcc"])
def test_a_token_that_does_not_fit_ends_the_request_alone(fixed: Fixed, tokens: str) -> None:
    matcher, other = (fixed.start("regex", "ab|abc") for _ in range(2))
    with pytest.raises(EngineError, match=r"token \d+ does not fit the request's grammar after"):
        matcher.advance([fixed.ids(letter)[0] for letter in tokens])
    other.advance([fixed.ids(letter)[0] for letter in "abc"])
    assert other.is_finished


@pytest.mark.parametrize("token", [-1, 10**9, 2**40])
def test_an_id_that_is_none_does_not_fit(fixed: Fixed, token: int) -> None:
    with pytest.raises(EngineError, match="does not fit"):
        fixed.start("json", "").advance([token])


def test_an_end_too_early_does_not_fit(fixed: Fixed) -> None:
    with pytest.raises(EngineError, match=f"token {END} does not fit"):
        fixed.start("json", "").advance([END])


def test_nothing_follows_an_end(fixed: Fixed) -> None:
    matcher = fixed.start("choice", '["no"]')
    matcher.advance([*fixed.ids("no"), END])
    with pytest.raises(EngineError, match="does not fit"):
        matcher.advance([END])


def test_more_than_there_is_cannot_be_rolled_back(fixed: Fixed) -> None:
    matcher = fixed.start("json", "")
    matcher.advance(fixed.ids("{"))
    for count in (2, -1):
        with pytest.raises(EngineError, match="cannot be rolled back; the grammar has taken 1"):
            matcher.rollback(count)
    matcher.rollback(1)
    assert matcher.num_tokens == 0


def test_a_requests_end_id_is_treated_like_the_models_eos(fixed: Fixed) -> None:
    comma = fixed.ids(",")[0]
    matcher = fixed.start("regex", "[a-z,]*x", end_ids=[END, comma])
    matcher.advance(fixed.ids("a"))
    assert matcher.count_accepted([comma]) == 0  # as text it would end the output too early
    assert comma not in allowed(fixed.walker.mask(matcher))
    matcher.advance(fixed.ids("x"))
    assert matcher.count_accepted([comma, comma]) == 1
    assert {comma, END} <= set(allowed(fixed.walker.mask(matcher)).tolist())
    matcher.advance([comma])
    assert set(allowed(fixed.walker.mask(matcher)).tolist()) == {comma, END}
    matcher.rollback(1)
    assert not matcher.has_ended


def test_without_the_model_s_end_only_the_request_s_counts(fixed: Fixed) -> None:
    comma = fixed.ids(",")[0]
    matcher = fixed.start("choice", '["no"]', end_ids=[comma])
    matcher.advance(fixed.ids("no"))
    assert set(allowed(fixed.walker.mask(matcher)).tolist()) == {comma}


def test_forced_tokens_are_accepted(fixed: Fixed) -> None:
    text = '["the one and only answer, 42"]'
    matcher = fixed.start("choice", text)
    forced = matcher.forced()
    assert b"".join(fixed.vocabulary.tokens[i] for i in forced).decode() == text[2:-2]
    assert matcher.count_accepted(forced) == len(forced) > 1
    matcher.advance(forced)
    assert matcher.is_finished and matcher.forced() == []


# Each count is a state of its own.
HEAVY = ("regex", "[^x]{0,9000}")


def walk_heavy(fixed: Fixed, matcher: Matcher, steps: int) -> None:
    rng = random.Random(0)
    for _ in range(steps):
        ids = allowed(fixed.walker.mask(matcher))
        ids = ids[ids != END]
        matcher.advance([int(ids[rng.randrange(len(ids))])])


def test_a_full_lexer_is_started_anew(fixed: Fixed, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is shared: what one sequence filled is no other one's fault, nor its own."""
    small = llguidance.LLParserLimits(max_lexer_states=3_000, verbose_errors=False)
    monkeypatch.setattr(grammars, "_LIMITS", small)
    grammar = compile_here(fixed.vocabulary, *HEAVY)
    first, second = (Matcher(grammar, fixed.vocabulary) for _ in range(2))
    walk_heavy(fixed, second, 3)
    walk_heavy(fixed, first, 200)
    assert first.num_recoveries > 0
    before = fixed.walker.mask(second)
    second.advance(fixed.ids("hello there"))
    assert second.num_tokens == 3 + len(fixed.ids("hello there"))
    assert before.any()
    walk_heavy(fixed, Matcher(grammar, fixed.vocabulary), 10)  # and new ones begin as ever
    # It is the same language all the while.
    plain = compile_here(fixed.vocabulary, *HEAVY)
    straight = Matcher(plain, fixed.vocabulary)
    straight.advance(first._tokens)
    assert np.array_equal(fixed.walker.mask(straight), fixed.walker.mask(first))


def test_a_grammar_that_does_not_get_anywhere_fails(
    fixed: Fixed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ambiguity without bound: each step costs more than the one before."""
    matcher = fixed.start("ebnf_grammar", 'root ::= s\ns ::= s s | "a" | "b" | "ab" | "ba"')
    ids = [fixed.ids(letter)[0] for letter in ("a", "b", "ab", "ba")]
    rng = random.Random(0)
    with pytest.raises(AssertionError, match="the request's grammar failed after"):
        for _ in range(2_000):
            fixed.walker.mask(matcher)  # asserts that no mask failed
            matcher.advance([ids[rng.randrange(4)]])
    assert matcher.num_tokens > 20


class Panic(BaseException):
    """As pyo3's PanicException: none of Exception."""


@pytest.mark.parametrize(
    "use",
    [
        lambda matcher: matcher.advance([0]),
        lambda matcher: matcher.count_accepted([5]),
        lambda matcher: matcher.may_end,
        lambda matcher: matcher.forced(),
    ],
)
def test_a_panic_is_an_error_of_the_request(fixed: Fixed, use: Callable[[Matcher], Any]) -> None:
    matcher = fixed.start("json", "")

    class Broken:
        def __getattr__(self, name: str) -> Any:
            if name in ("is_stopped", "is_error"):
                return lambda: False

            def panic(*_: Any) -> None:
                raise Panic("called `Option::unwrap()` on a `None` value")

            return panic

    matcher.state = Broken()  # type: ignore[assignment]
    with pytest.raises(EngineError, match=r"^the request's grammar broke: Panic$"):
        use(matcher)


def test_an_interrupt_is_no_panic() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        guarded(interrupt)


def test_a_source_that_the_library_refuses_is_an_engine_error(vocabulary: Vocabulary) -> None:
    with pytest.raises(EngineError, match="a grammar broke: "):
        Grammar(vocabulary.llguidance_tokenizer(), "start: @nowhere")
