"""A model's tokens as the bytes that they add to a text, and llguidance's view of them.

Light to import: the sandbox needs nothing else of a tokenizer. `bridge` makes one of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache

import llguidance
import msgspec

Encode = Callable[[str], list[int]]

# Where a grammar leaves no choice, the library has the text that must come encoded for each mask.
# A tokenizer takes longer for that than a mask does, and the texts are the same ones again and
# again: a schema's keys, and what is left of them. Long ones would fill the memory.
_MAX_KEPT = 4096
_MAX_KEPT_LEN = 128


class Vocabulary(msgspec.Struct, frozen=True, dict=True):
    """What a grammar has to know of a model; crosses into the sandbox as it is.

    Attributes:
        tokens: the bytes of each id of the *model*, of which there may be more than the tokenizer
            has: these are b"" and never allowed. A special token's are its name, which only a
            grammar that names the token as one can ask for (Lark's `<|name|>`).
        special_ids: tokens that are not text.
        end_ids: tokens that end an output; none of them is text either, whatever the tokenizer
            says.
    """

    tokens: list[bytes]
    special_ids: list[int]
    end_ids: list[int]

    @property
    def size(self) -> int:
        return len(self.tokens)

    @property
    def num_words(self) -> int:
        """Words of 32 bits in a mask."""
        return -(-self.size // 32)

    @property
    def num_used(self) -> int:
        """The highest id that is a token, and one more: padding follows."""
        size = self.size
        while size and not self.tokens[size - 1] and size - 1 not in self.end_ids:
            size -= 1
        return size

    @cached_property
    def whitespace(self) -> Mapping[int, int]:
        """The tokens that are nothing but white space in JSON, and how many bytes each has."""
        return {
            id_: len(text)
            for id_, text in enumerate(self.tokens)
            if text and not text.strip(b" \t\r\n")
        }

    @property
    def stop_id(self) -> int:
        """The token that the library may take for the end: one of end_ids, if there are any."""
        return (*self.end_ids, *self.special_ids, self.size - 1)[0]

    def llguidance_tokenizer(self, encode: Encode | None = None) -> llguidance.LLTokenizer:
        """llguidance's view.

        Args:
            encode: text -> ids of the same bytes, as the model was trained to see them: where a
                grammar leaves no choice, these are forced. None takes the longest tokens.
        """
        source = _Source(self, encode)
        source.tokenizer = llguidance.LLTokenizer(
            source,  # type: ignore[arg-type]  # it takes whatever has these attributes
            n_vocab=self.size,
            eos_token=self.end_ids or [self.stop_id],
        )
        return source.tokenizer


class _Source:
    """What llguidance asks of a tokenizer (`llguidance.TokenizerWrapper` has the same shape)."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, encode: Encode | None) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special_ids or [vocabulary.stop_id]
        self.eos_token_id = vocabulary.stop_id
        self.tokenizer: llguidance.LLTokenizer | None = None
        self._encode = encode
        self._kept = lru_cache(_MAX_KEPT)(self._ids)

    def __call__(self, text: str) -> list[int]:
        return self._kept(text) if len(text) <= _MAX_KEPT_LEN else self._ids(text)

    def _ids(self, text: str) -> list[int]:
        try:
            ids = self._encode(text) if self._encode is not None else []
        except Exception:  # of whatever kind, it would be a panic in the library that calls
            ids = []
        if ids or self.tokenizer is None:
            return ids
        return self.tokenizer.greedy_tokenize(text)
