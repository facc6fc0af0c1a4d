"""A token is a breaker if its text contains one of the strings."""

import pytest

from inflight.sampling.params import DRY_SEQUENCE_BREAKERS
from inflight.text.detokenize import Detokenizer
from inflight.text.dry_breakers import DryBreakers
from inflight.text.tokenizer import Tokenizer


@pytest.mark.parametrize(
    "strings",
    [DRY_SEQUENCE_BREAKERS, ("\n",), ("ing", " the"), (" ",), ("aa", "a"), ("é",)],
    ids=str,
)
def test_breakers_are_the_tokens_with_the_strings_in_them(
    smollm: Tokenizer, sentencepiece: Tokenizer, strings: tuple[str, ...]
) -> None:
    for tokenizer in (smollm, sentencepiece):
        detokenizer = Detokenizer(tokenizer)
        texts = [detokenizer.join((id_,)) for id_ in range(tokenizer.vocab_size)]
        expected = set(tokenizer.special_ids)
        for string in strings:
            whole = [i for i, text in enumerate(texts) if string.encode() in text]
            expected |= set(whole or tokenizer.encode(string, add_special_tokens=False)[-1:])
        breakers = DryBreakers(tokenizer, detokenizer)
        assert breakers.ids(strings) == expected
        assert breakers.ids(list(strings)) is breakers.ids(strings), "and are remembered"


def test_a_breaker_in_no_single_token_is_represented_by_its_last_token(smollm: Tokenizer) -> None:
    string = "zq zq Bartholomew"
    ids = smollm.encode(string, add_special_tokens=False)
    found = DryBreakers(smollm, Detokenizer(smollm)).ids([string])
    assert found == {ids[-1], *smollm.special_ids}


def test_no_strings_leave_the_special_tokens(smollm: Tokenizer) -> None:
    assert DryBreakers(smollm, Detokenizer(smollm)).ids([]) == set(smollm.special_ids)
