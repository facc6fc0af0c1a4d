"""Text to ids, in this process: the tokenizer's library with markers kept apart from text.

Costs whatever the tokenizer and the text cost; `Tokenizer` decides what may run where.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterator, Sequence

import tokenizers

from inflight.errors import RequestError


class Encoder:
    """Encodes texts. Thread-safe.

    Args:
        backend: the library's tokenizer.
        markers: text -> id of the tokens that no message may contain.
    """

    def __init__(self, backend: tokenizers.Tokenizer, markers: dict[str, int]) -> None:
        self._backend = backend
        self._markers = markers
        self._lock = threading.Lock()
        self._marking: _MarkingBackend | None = None

    def encode(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        """Ids of a text; see `Tokenizer.encode`.

        Raises:
            RequestError: the tokenizer fails on it.
        """
        with _failures_named(param):
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_pieces(self, pieces: Sequence[str | int], param: str) -> list[int]:
        """Ids of a text; see `Tokenizer.encode_pieces`.

        Raises:
            RequestError: the tokenizer fails on it, or its merges turn a string into a marker.
        """
        with _failures_named(param):
            with self._lock:
                if self._marking is None:
                    self._marking = _MarkingBackend(self._backend, self._markers)
            return self._marking.encode(pieces, param)


class _MarkingBackend:
    """A copy of a backend in which each marker has a secret, unguessable text.

    The library finds markers by their text, which it needs for splitting the text around them. So
    an intended marker is passed as its secret text, and the marker's own text, which is not a token
    here, is ordinary text.
    """

    def __init__(self, backend: tokenizers.Tokenizer, markers: dict[str, int]) -> None:
        secret = secrets.token_hex(16)
        self._spelling = {id_: f"\ue000{secret}:{id_:x}\ue001" for id_ in markers.values()}
        # Shares the model: the copy costs next to nothing.
        self._twin = tokenizers.Tokenizer(backend.model)
        if backend.normalizer is not None:
            self._twin.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            self._twin.pre_tokenizer = backend.pre_tokenizer
        added = dict(sorted(backend.get_added_tokens_decoder().items()))
        self._twin.add_tokens(
            [
                tokenizers.AddedToken(
                    self._spelling.get(id_, token.content),
                    single_word=token.single_word,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=token.normalized,
                    special=token.special,
                )
                for id_, token in added.items()
            ]
        )
        self._real_id = {
            self._twin.token_to_id(self._spelling.get(id_, token.content)): id_
            for id_, token in added.items()
        }
        unknown = getattr(backend.model, "unk_token", None)
        self._forbidden = {
            id_ for text, id_ in markers.items() if text != unknown and id_ not in self._real_id
        }

    def encode(self, pieces: Sequence[str | int], param: str) -> list[int]:
        text = "".join(
            self._spelling[piece] if isinstance(piece, int) else piece for piece in pieces
        )
        ids = self._twin.encode(text, add_special_tokens=False).ids
        if not self._forbidden.isdisjoint(ids):
            raise RequestError("the text contains one of the model's special tokens", param)
        return [self._real_id.get(id_, id_) for id_ in ids]


@contextlib.contextmanager
def _failures_named(param: str) -> Iterator[None]:
    """Turn what the library raises, bare Exception or a panic, into a RequestError."""
    try:
        yield
    except (RequestError, MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # its text may quote the tokenizer
        raise RequestError("the model's tokenizer failed on the text", param) from None
