"""A model's tokens as the bytes that they add to a text, and llguidance's view of them.

Light to import: the sandbox needs nothing else of a tokenizer. `bridge` builds one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache

import llguidance
import msgspec

Encode = Callable[[str], list[int]]

# Where a grammar forces text, the library encodes it for each mask. That takes a tokenizer longer
# than the mask itself, and the texts repeat (a schema's keys and their suffixes), so they are
# cached, except long ones.
_MAX_KEPT = 4096
_MAX_KEPT_LEN = 128


class Vocabulary(msgspec.Struct, frozen=True, dict=True):
    """A model's vocabulary as grammars need it; sent to the sandbox as it is.

    Attributes:
        tokens: the bytes of each id of the *model*, which may have more than the tokenizer: those
            are b"" and never allowed. A special token has its name, which only a grammar that names
            it as a token (Lark's `<|name|>`) can allow.
        special_ids: tokens that are not text.
        end_ids: tokens that end an output; never text, even if the tokenizer says so.
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
        """One more than the highest id that is a token; padding follows."""
        size = self.size
        while size and not self.tokens[size - 1] and size - 1 not in self.end_ids:
            size -= 1
        return size

    @cached_property
    def whitespace(self) -> Mapping[int, int]:
        """The tokens that are only JSON white space, with their length in bytes."""
        return {
            id_: len(text)
            for id_, text in enumerate(self.tokens)
            if text and not text.strip(b" \t\r\n")
        }

    @property
    def stop_id(self) -> int:
        """The library's end token: one of end_ids, if there are any."""
        return (*self.end_ids, *self.special_ids, self.size - 1)[0]

    def llguidance_tokenizer(self, encode: Encode | None = None) -> llguidance.LLTokenizer:
        """llguidance's view.

        Args:
            encode: text -> ids as the model was trained on, used for text that a grammar forces.
                None takes the longest tokens.
        """
        source = _Source(self, encode)
        source.tokenizer = llguidance.LLTokenizer(
            source,  # type: ignore[arg-type]  # it takes whatever has these attributes
            n_vocab=self.size,
            eos_token=self.end_ids or [self.stop_id],
        )
        return source.tokenizer


class _Source:
    """llguidance's tokenizer interface (that of `llguidance.TokenizerWrapper`)."""

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
