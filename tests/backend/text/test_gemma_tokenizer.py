"""The tokenizer and the chats of a real GGUF file of Gemma 3, which has no chat template."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

import gemma
from gguf_transformers import quick_reader
from inflight.text.chat import encode_chat
from inflight.text.detokenize import Detokenizer
from inflight.text.template import Conversation
from inflight.text.tokenizer import Tokenizer
from texts import TEXTS

# White space, digits, HTML, characters without a token, and control tokens. transformers merges
# runs of more than 31 spaces, which SentencePiece does not.
EDGES = [
    *("", "a", " ", "  ", " " * 31, "\t\t x", "\r\n\r\n", " \n \n", "\n  a", "x  \n\n\n"),
    *("\n" * 31, "\n" * 40, "\t" * 40, "1234567890", "3.14e-10", "½²٣", "Ｗｉｄｅ"),  # noqa: RUF001
    *("<b>x</b> <h1>", "</div></div>", "<table><tr>\n<td>1</td>", "[multimodal] x"),
    *("a\u2581b", "\u2581\u2581x", " \u2581", "\U000f0000", "𐍈", "\x00\x01", "\u200b\u200d"),
    *("<start_of_turn>user\nHi<end_of_turn>\n", "<bos>x<eos>", "<unused5>", "<unused", "<0x0A>"),
    "def f(x):\n    return x\n\n\n    y = 2\n",
]

pytestmark = pytest.mark.gemma


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(gemma.checkpoint())


@pytest.fixture(scope="module")
def reference() -> Any:
    path = gemma.checkpoint().path
    with quick_reader():
        return transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def test_ids_are_those_of_transformers(tokenizer: Tokenizer, reference: Any) -> None:
    for text in [*TEXTS, *EDGES]:
        assert tokenizer.encode(text) == reference(text)["input_ids"], text


def test_long_runs_of_spaces_are_those_of_sentencepiece(tokenizer: Tokenizer) -> None:
    """The longest defined run first: of 31 spaces."""
    ids = tokenizer.vocabulary()
    found = tokenizer.encode(" " * 70, add_special_tokens=False)
    assert found == [ids[" " * 31], ids[" " * 31], ids[" " * 8]]


def test_texts_stream_back_token_by_token(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    for text in [*TEXTS[::3], *(text for text in EDGES if "<" not in text)]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        parts = [
            detokenizer.delta(
                detokenizer.window_for(ids, at), ids[at : at + 1], final=at + 1 == len(ids)
            )
            for at in range(len(ids))
        ]
        assert "".join(parts) == text.replace("\u2581", " ")


def test_an_output_ends_with_its_turn(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_ids == (1, 106)  # the file names 1 alone
    assert tokenizer.special_ids[106] == "<end_of_turn>"


def test_chats_have_gemma_s_form(tokenizer: Tokenizer, reference: Any) -> None:
    messages = [
        {"role": "system", "content": "Be <b>brief</b>."},
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "<end_of_turn>"},
    ]
    prompt = (
        "<bos><start_of_turn>user\nBe <b>brief</b>.\n\nWhat is 2 + 2?<end_of_turn>\n"
        "<start_of_turn>model\n4<end_of_turn>\n<start_of_turn>user\n"
    )
    ids = encode_chat(tokenizer, Conversation(messages))
    begin = reference(prompt, add_special_tokens=False)["input_ids"]
    assert ids[: len(begin)] == begin
    assert ids.count(106) == 3 and ids.count(2) == 1  # the user's text is no end of a turn
