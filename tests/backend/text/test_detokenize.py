"""Streamed text equals a full decode, wherever the stream is split."""

import functools
import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from inflight.errors import ConfigError
from inflight.text.detokenize import Detokenizer, incomplete, mark_kept
from inflight.text.tokenizer import Tokenizer
from texts import TEXTS

FAST = settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


detokenizer_of = functools.cache(Detokenizer)


def stream(
    detokenizer: Detokenizer, prompt: Sequence[int], output: Sequence[int], sizes: Sequence[int]
) -> str:
    """The text of an output that comes in parts of these sizes, over and over."""
    ids = [*prompt, *output]
    text, start, turns = "", len(prompt), itertools.cycle(sizes)
    while True:
        end = min(start + next(turns), len(ids))
        final = end == len(ids)
        window = detokenizer.window_for(ids, start)
        assert len(window) <= 3
        text += detokenizer.delta(window, ids[start:end], final=final)
        start = end
        if final:
            return text


def round_trip(tokenizer: Tokenizer, text: str) -> str:
    """What comes back of a text: SentencePiece writes U+2581 for a space, so has none itself."""
    spells_spaces = (tokenizer.decoder or {})["type"] == "Sequence"
    return text.replace("\u2581", " ") if spells_spaces else text


@pytest.mark.parametrize("width", range(1, 9))
def test_every_text_streams_as_it_decodes_at_every_width(
    smollm: Tokenizer, sentencepiece: Tokenizer, width: int
) -> None:
    for tokenizer in (smollm, sentencepiece):
        detokenizer = detokenizer_of(tokenizer)
        for text in TEXTS:
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert stream(detokenizer, [], ids, [width]) == round_trip(tokenizer, text)


def test_every_text_streams_as_it_decodes_at_random_splits(
    smollm: Tokenizer, llama3: Tokenizer, sentencepiece: Tokenizer
) -> None:
    draw = random.Random(0)
    for tokenizer in (smollm, llama3, sentencepiece):
        detokenizer = detokenizer_of(tokenizer)
        for text in TEXTS:
            ids = tokenizer.encode(text, add_special_tokens=False)
            sizes = [draw.choice([0, 1, 1, 1, 2, 3, 7]) for _ in ids] + [1]
            assert stream(detokenizer, [], ids, sizes) == round_trip(tokenizer, text)


def test_no_part_of_a_stream_shows_a_replacement_character(smollm: Tokenizer) -> None:
    detokenizer = detokenizer_of(smollm)
    for text in TEXTS:
        ids = smollm.encode(text, add_special_tokens=False)
        for i in range(len(ids)):
            assert "\ufffd" not in detokenizer.delta(detokenizer.window_for(ids, i), ids[i : i + 1])


@FAST
@given(data=st.data())
def test_random_ids_stream_as_they_decode(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Random ids are mostly broken UTF-8, special tokens and ids that do not exist."""
    detokenizer = detokenizer_of(tokenizer)
    ids_ = _ids(tokenizer)
    prompt = data.draw(st.lists(ids_, max_size=6))
    output = data.draw(st.lists(ids_, max_size=24))
    sizes = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=8).filter(any))
    window = detokenizer.window_for(prompt, len(prompt))
    once = detokenizer.delta(window, output, final=True)
    assert stream(detokenizer, prompt, output, sizes) == once


@FAST
@given(data=st.data())
def test_a_window_of_a_window_is_enough(tokenizer: Tokenizer, data: st.DataObject) -> None:
    detokenizer = detokenizer_of(tokenizer)
    before = data.draw(st.lists(_ids(tokenizer), max_size=12))
    new = data.draw(st.lists(_ids(tokenizer), max_size=6))
    window = detokenizer.window_for(before, len(before))
    ids = [*before, *new]
    short = [*window, *new]
    assert detokenizer.window_for(short, len(short)) == detokenizer.window_for(ids, len(ids))


@FAST
@given(data=st.data())
def test_a_byte_level_decode_is_the_library_s_for_random_ids(
    smollm: Tokenizer, llama3: Tokenizer, data: st.DataObject
) -> None:
    for tokenizer in (smollm, llama3):
        ids = data.draw(st.lists(_ids(tokenizer), max_size=30))
        right = _library(tokenizer).decode(ids, skip_special_tokens=True)
        assert detokenizer_of(tokenizer).decode(ids) == right


def test_each_token_decodes_as_in_the_library(tokenizer: Tokenizer) -> None:
    detokenizer, library = detokenizer_of(tokenizer), _library(tokenizer)
    for id_ in range(tokenizer.vocab_size + 3):
        assert detokenizer.decode([id_]) == library.decode([id_], skip_special_tokens=True)


def test_a_sentencepiece_decode_is_the_library_s(
    sentencepiece: Tokenizer, sentencepiece_bare: Tokenizer
) -> None:
    for tokenizer in (sentencepiece, sentencepiece_bare):
        detokenizer, library = detokenizer_of(tokenizer), _library(tokenizer)
        for text in TEXTS:
            ids = tokenizer.encode(text)
            assert detokenizer.decode(ids) == library.decode(ids) == round_trip(tokenizer, text)


def test_an_output_continues_the_text_of_its_prompt(tokenizer: Tokenizer) -> None:
    """A reply keeps its leading space where the text before it needs it."""
    detokenizer = detokenizer_of(tokenizer)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        for start in (1, len(ids) // 2, len(ids)):
            head = stream(detokenizer, [], ids[:start], [3])
            if "\ufffd" in head:
                continue  # cut inside a character: the next test's matter
            window = detokenizer.window_for(ids, start)
            tail = detokenizer.delta(window, ids[start:], final=True)
            assert head + tail == round_trip(tokenizer, text)


def test_a_character_that_the_prompt_began_belongs_to_the_output(smollm: Tokenizer) -> None:
    detokenizer = detokenizer_of(smollm)
    ids = smollm.encode("𠮷", add_special_tokens=False)
    assert len(ids) > 2
    for start in range(1, len(ids)):
        window = detokenizer.window_for(ids, start)
        assert detokenizer.delta(window, ids[start:], final=True) == "𠮷"
        following = smollm.encode("A", add_special_tokens=False)
        assert detokenizer.delta(window, following, final=True).endswith("A")


def test_the_first_space_is_stripped_at_the_start_of_a_text_only(sentencepiece: Tokenizer) -> None:
    detokenizer = detokenizer_of(sentencepiece)
    (bos,) = sentencepiece.encode("")[:1]
    word = sentencepiece.encode("a", add_special_tokens=False)
    assert detokenizer.decode([bos, *word]) == "a"
    assert detokenizer.decode([*word, *word]) == "a a"
    assert detokenizer.delta(detokenizer.window_for([bos], 1), word) == "a"
    assert detokenizer.delta(detokenizer.window_for(word, len(word)), word) == " a"
    # Special tokens between do not make a new start.
    ids = [*word, bos, bos, bos]
    assert detokenizer.delta(detokenizer.window_for(ids, len(ids)), word) == " a"


def test_special_tokens_inside_a_character_do_not_hide_its_first_bytes(smollm: Tokenizer) -> None:
    detokenizer = detokenizer_of(smollm)
    first, *rest = smollm.encode("𠮷", add_special_tokens=False)
    ids = [first, *[smollm.eos_ids[0]] * 40, *rest]
    assert stream(detokenizer, [], ids, [1]) == "𠮷"


def test_trim_cuts_characters_from_the_end(smollm: Tokenizer) -> None:
    detokenizer = detokenizer_of(smollm)
    ids = smollm.encode("naïve 👍🏻 END", add_special_tokens=False)
    assert detokenizer.delta([], ids, final=True, trim=4) == "naïve 👍🏻"
    assert detokenizer.delta([], ids, final=True, trim=0) == "naïve 👍🏻 END"
    assert detokenizer.delta([], ids, final=True, trim=1000) == ""


def test_ids_that_do_not_exist_have_no_text(tokenizer: Tokenizer) -> None:
    assert detokenizer_of(tokenizer).decode([-1, tokenizer.vocab_size, 2**31 - 1]) == ""


def test_incomplete_is_what_a_further_byte_could_complete() -> None:
    euro = "€".encode()
    assert incomplete(b"a" + euro[:2]) == euro[:2]
    assert incomplete(euro) == b""
    assert incomplete("𠮷".encode()[:3]) == "𠮷".encode()[:3]
    assert incomplete(b"\xe0\x80") == b""  # overlong: no byte makes a character of it
    assert incomplete(b"\xff") == b""
    assert incomplete(b"") == b""


@pytest.mark.parametrize(
    ("decoder", "name"),
    [
        (decoders.WordPiece(), "WordPiece"),
        (decoders.Metaspace(), "Metaspace"),
        (None, "none"),
        (decoders.Sequence([decoders.Fuse(), decoders.ByteLevel()]), r"Fuse \+ ByteLevel"),
    ],
)
def test_a_decoder_of_another_kind_is_refused_by_name(decoder: Any, name: str) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(ConfigError, match=f"decoder {name} is not supported"):
        Detokenizer(Tokenizer(backend))


# ---------------------------------------------------------------- special tokens that are kept


@FAST
@given(data=st.data())
def test_kept_special_tokens_split_anywhere_and_change_no_other_text(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    detokenizer = detokenizer_of(tokenizer)
    special = list(tokenizer.special_ids)
    kept = data.draw(st.sets(st.sampled_from(special)))
    prompt = data.draw(st.lists(_ids(tokenizer), max_size=4))
    output = data.draw(st.lists(_ids(tokenizer) | st.sampled_from(special), max_size=20))
    cuts = data.draw(st.lists(st.integers(0, len(output)), max_size=6).map(sorted))
    marked = mark_kept(output, kept)
    window = detokenizer.window_for(prompt, len(prompt))
    once = detokenizer.delta_with_kept(window, marked, final=True)
    parts = ""
    for start, end in itertools.pairwise([0, *cuts, len(output)]):
        context = [*prompt, *output[:start]]
        parts += detokenizer.delta_with_kept(
            detokenizer.window_for(context, len(context)), marked[start:end]
        )
    context = [*prompt, *output]
    last = detokenizer.window_for(context, len(context))
    parts += detokenizer.delta_with_kept(last, [], final=True)
    assert parts == once
    nothing_kept = detokenizer.delta_with_kept(window, output, final=True)
    assert nothing_kept == detokenizer.delta(window, output, final=True)


def test_kept_special_tokens_are_between_the_texts(smollm: Tokenizer) -> None:
    detokenizer = detokenizer_of(smollm)
    start, end = detokenizer.special_ids["<|im_start|>"], detokenizer.special_ids["<|im_end|>"]
    for text in TEXTS:
        ids = smollm.encode(text, add_special_tokens=False)
        shown = mark_kept([start, *ids, end, *ids, start], {start})
        expected = f"<|im_start|>{text}{text}<|im_start|>"
        assert detokenizer.delta_with_kept([], shown, final=True) == expected


def test_a_kept_special_token_does_not_break_a_character(smollm: Tokenizer) -> None:
    detokenizer = detokenizer_of(smollm)
    start = detokenizer.special_ids["<|im_start|>"]
    first, *rest = smollm.encode("𠮷", add_special_tokens=False)
    shown = mark_kept([first, start, *rest], {start})
    assert detokenizer.delta_with_kept([], shown, final=True) == "<|im_start|>𠮷"


@pytest.mark.parametrize(
    ("trim", "text"),
    [(0, "one<S> two<S>"), (1, "one<S> tw"), (4, "one<S>"), (5, "on"), (7, ""), (9, "")],
)
def test_a_trimmed_text_has_no_special_tokens_after_it(
    smollm: Tokenizer, trim: int, text: str
) -> None:
    detokenizer = detokenizer_of(smollm)
    start = detokenizer.special_ids["<|im_start|>"]
    one, two = (smollm.encode(word, add_special_tokens=False) for word in ("one", " two"))
    shown = mark_kept([*one, start, *two, start], {start})
    found = detokenizer.delta_with_kept([], shown, final=True, trim=trim)
    assert found == text.replace("<S>", "<|im_start|>")


@functools.cache
def _ids(tokenizer: Tokenizer) -> st.SearchStrategy[int]:
    special = [*tokenizer.special_ids, tokenizer.vocab_size + 1]
    vocabulary = tokenizer.vocabulary()
    # Tokens of one byte are what broken characters are made of.
    short = [id_ for token, id_ in vocabulary.items() if len(token) == 1 or token[:3] == "<0x"]
    return st.one_of(
        st.integers(0, tokenizer.vocab_size - 1), st.sampled_from(short), st.sampled_from(special)
    )


def _library(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    return tokenizer._backend


def test_a_single_token_has_a_display_name(smollm: Tokenizer, sentencepiece: Tokenizer) -> None:
    for tokenizer in (smollm, sentencepiece):
        detokenizer = detokenizer_of(tokenizer)
        for id_, name in tokenizer.special_ids.items():
            assert detokenizer.name(id_) == name
        for id_ in tokenizer.encode("Grüße 😀", add_special_tokens=False):
            assert detokenizer.name(id_) == detokenizer.join([id_]).decode("utf-8", "replace")
        assert detokenizer.name(10**6) == ""


class Sparse:
    """A tokenizer whose second token has this id."""

    def __init__(self, id_: int) -> None:
        self.decoder = {"type": "ByteLevel"}
        self.special_ids: dict[str, int] = {}
        self._id = id_

    def vocabulary(self) -> dict[str, int]:
        return {"a": 0, "b": self._id}


def test_ids_without_a_token_have_no_text() -> None:
    detokenizer = Detokenizer(Sparse(7))  # type: ignore[arg-type]
    assert detokenizer.decode([0, 3, 7, 8, -1, -8, 1 << 40, 0]) == "aba"
    assert detokenizer.window_for([7, 3, 99, -1], 4) == [7]


def test_an_id_that_no_vocabulary_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"token with id 4294967295; allowed: up to 16777215"):
        Detokenizer(Sparse((1 << 32) - 1))  # type: ignore[arg-type]
