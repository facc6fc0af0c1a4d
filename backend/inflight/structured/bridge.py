"""From a tokenizer of ours to the vocabulary that grammars are matched with.

The bytes of a token are those that `text.detokenize` writes the output with: what a grammar accepts
is, byte for byte, what the client gets, whatever family the tokenizer is of.
"""

from __future__ import annotations

from collections.abc import Iterable

from inflight.structured.vocabulary import Encode, Vocabulary
from inflight.text.detokenize import Detokenizer
from inflight.text.tokenizer import Tokenizer

# Not in any text: in front of it, a SentencePiece tokenizer puts the space that it puts in front
# of every text, so what follows is encoded as it stands.
_MARK = "\x02"


def vocabulary(tokenizer: Tokenizer, vocab_size: int, end_ids: Iterable[int]) -> Vocabulary:
    """The vocabulary of a model.

    Args:
        tokenizer: the model's.
        vocab_size: of the model's logits.
        end_ids: every token that ends an output of this model; ids that it has not are left out.

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
    """A function text -> ids: the tokenizer's of a text that stands within a text.

    They are checked, since the library takes wrong ones for a broken grammar, and special tokens
    that are spelled out in a text are wrong ones. Where they do not fit, it returns [].
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
