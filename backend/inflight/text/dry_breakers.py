"""DRY sequence breakers: the tokens whose text contains one of the given strings."""

from __future__ import annotations

import bisect
from collections.abc import Iterable

from inflight.text.detokenize import Detokenizer
from inflight.text.tokenizer import Tokenizer

# Requests with the same strings, nearly always the defaults, share the result.
_MAX_CACHED = 64


class DryBreakers:
    """Finds the tokens of a vocabulary that contain given strings.

    The texts of all tokens are concatenated on first use; searching them takes microseconds.
    """

    def __init__(self, tokenizer: Tokenizer, detokenizer: Detokenizer) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = detokenizer
        self._starts: list[int] = []  # of each token in _text
        self._text = b""
        self._cache: dict[tuple[str, ...], frozenset[int]] = {}

    def ids(self, strings: Iterable[str]) -> frozenset[int]:
        """The tokens whose text contains one of these strings, and the special tokens.

        Special tokens delimit turns: repetition across them is format, not looping. A string that
        no single token contains is represented by the last token of its encoding.
        """
        key = tuple(strings)
        found = self._cache.get(key)
        if found is None:
            found = frozenset(self._tokenizer.special_ids).union(*map(self._with, key))
            if len(self._cache) >= _MAX_CACHED:
                self._cache.clear()
            self._cache[key] = found
        return found

    def _with(self, string: str) -> set[int]:
        if not self._starts:
            self._join()
        text, wanted = self._text, string.encode()
        found: set[int] = set()
        at = text.find(wanted)
        while at >= 0:
            token_id = bisect.bisect_right(self._starts, at) - 1
            end = self._starts[token_id + 1]
            if at + len(wanted) <= end:
                found.add(token_id)
                at = text.find(wanted, end)  # one occurrence per token suffices
            else:
                at = text.find(wanted, at + 1)
        if not found:
            found.update(self._tokenizer.encode(string, add_special_tokens=False)[-1:])
        return found

    def _join(self) -> None:
        pieces = [self._detokenizer.join((id_,)) for id_ in range(self._tokenizer.vocab_size)]
        position = 0
        for piece in pieces:
            self._starts.append(position)
            position += len(piece)
        self._starts.append(position)
        self._text = b"".join(pieces)
