"""Converts a tokenizer to the vocabulary that grammars are matched with.

The bytes of a token are those with which `text.detokenize` writes the output, so that the client
gets, byte for byte, what the grammar accepts, for every tokenizer family.
"""

from __future__ import annotations

from collections.abc import Iterable

from inflight.structured.vocabulary import Encode, Vocabulary
from inflight.text.detokenize import Detokenizer
from inflight.text.tokenizer import Tokenizer

# Occurs in no text: a SentencePiece tokenizer inserts its leading space before it, so what follows
# is encoded as it is.
_MARK = "\x02"


def vocabulary(tokenizer: Tokenizer, vocab_size: int, end_ids: Iterable[int]) -> Vocabulary:
    """The vocabulary of a model.

    Args:
        tokenizer: the model's.
        vocab_size: of the model's logits.
        end_ids: every token that ends an output; ids outside the vocabulary are dropped.

    Raises:
        ConfigError: the tokenizer's decoder is of an unknown kind.
    """
    detokenizer = Detokenizer(tokenizer)
    ends = sorted({id_ for id_ in end_ids if 0 <= id_ < vocab_size})
    names = {id_: text for id_, text in tokenizer.special_ids.items() if id_ < vocab_size}
    tokens = [detokenizer.join((id_,)) for id_ in range(vocab_size)]
    for id_, name in names.items():
        tokens[id_] = name.encode("utf-8")
    return Vocabulary(tokens, sorted({*names, *ends}), ends)


def encoder(tokenizer: Tokenizer, vocabulary: Vocabulary) -> Encode:
    """A function text -> ids, as the tokenizer encodes a text inside a longer one.

    The ids are checked, since the library would take wrong ones (such as special tokens spelled out
    in the text) for a broken grammar; if they do not spell the text, it returns [].
    """
    special = frozenset(vocabulary.special_ids)
    tokens = vocabulary.tokens

    def encode(text: str) -> list[int]:
        ids = tokenizer.encode(_MARK + text, add_special_tokens=False)
        wanted = text.encode("utf-8")
        left = len(wanted)
        for position in range(len(ids) - 1, -1, -1):
            id_ = ids[position]
            if id_ in special or id_ >= len(tokens):
                return []
            left -= len(tokens[id_])
            if left <= 0:
                found = ids[position:]
                joined = b"".join([tokens[each] for each in found])
                return found if joined == wanted else []
        return []

    return encode
