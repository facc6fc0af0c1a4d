"""Incremental detokenization as a pure function: no state between calls.

The text of an output, for every tokenizer family, is

    text = what the output ids add to the text of the prompt

that is: the bytes of all output ids after the prompt, decoded as UTF-8 with U+FFFD for invalid
bytes. So the prompt matters in two cases only. If it ends inside a character (possible for a prompt
of ids), that character belongs to the output. And a SentencePiece decoder strips one space at the
start of a text: the output is at the start only if the prompt has no text, so a reply " Paris"
keeps its space after "The capital is" and loses it after "<s>".

A stream may be split anywhere. `delta` takes the new ids and a short `window` of the ids before
them, and returns the text that they add. Bytes of an incomplete character at the end are withheld,
unless `final`, and come with a later delta, whose window includes them. The deltas of any split of
an output, the last one `final`, concatenate to the full decode:

    delta(w0, ids, final=True) == "".join(delta(w[i], ids[i], final=i == last) for each part i)

Three bytes of context suffice in UTF-8: a lead byte is never a continuation byte, so the bytes from
the last lead byte on determine whether a character is incomplete.

Special tokens have no text. Those that a client wants to keep are marked (`mark_kept`), and
`delta_with_kept` puts their text between that of the other ids, which stays the same.
"""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from inflight.errors import ConfigError
from inflight.text.tokenizer import Tokenizer

# An incomplete UTF-8 character has at most three bytes.
_MAX_PENDING = 3

MAX_TOKEN_ID = (1 << 24) - 1
"""Of a token. A vocabulary has memory for all ids up to its largest."""

KEPT = -(1 << 31)
"""Added to the id of a special token whose text is kept, which is then negative, and INT32."""


def mark_kept(ids: Iterable[int], kept: Collection[int]) -> list[int]:
    """Ids with KEPT added to those in `kept`."""
    return [id_ + KEPT if id_ in kept else id_ for id_ in ids]


class Detokenizer:
    """The inverse of a tokenizer.

    Special tokens (end of turn, begin of text) have no text, nor have ids outside the vocabulary:
    a model's embedding is often padded beyond it.

    Args:
        tokenizer: with a byte-level decoder (GPT-2's alphabet), or a SentencePiece-like one
            (Replace, ByteFallback, Fuse and perhaps Strip).

    Attributes:
        special_ids: text of each special token -> its id.

    Raises:
        ConfigError: the decoder is not supported, or a token's id exceeds MAX_TOKEN_ID.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        spell, self._strips_space = _family(tokenizer.decoder)
        special, vocabulary = tokenizer.special_ids, tokenizer.vocabulary()
        last = max(vocabulary.values(), default=-1)
        if last > MAX_TOKEN_ID:
            raise ConfigError(
                f"the tokenizer has a token with id {last}; allowed: up to {MAX_TOKEN_ID}"
            )
        # By id: a dict would take 70 bytes more for each token, in each process.
        self._pieces = [b""] * (1 + last)
        for token, id_ in vocabulary.items():
            if id_ not in special:
                self._pieces[id_] = spell(token)
        self.special_ids = {token: id_ for id_, token in special.items()}
        self._special = special

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids at the start of a text."""
        return self.delta((), ids, final=True)

    def delta(
        self, window: Iterable[int], new: Iterable[int], *, final: bool = False, trim: int = 0
    ) -> str:
        """The text that `new` adds after `window`.

        Args:
            window: ids just before `new`, as `window_for` gives them.
            new: ids.
            final: nothing follows: return an incomplete character as U+FFFD.
            trim: characters to remove from the end of the text.
        """
        before = self.join(window)
        pending = incomplete(before)
        text, _ = codecs.utf_8_decode(pending + self.join(new), "replace", final)
        if self._strips_space and not before and text.startswith(" "):
            text = text[1:]
        return text[:-trim] if trim > 0 else text

    def delta_with_kept(
        self, window: Iterable[int], new: Iterable[int], *, final: bool = False, trim: int = 0
    ) -> str:
        """As `delta`, with the text of special tokens that are marked.

        Such a text does not interrupt a character: it precedes one that is incomplete there.

        Args:
            new: ids, with KEPT added to those of special tokens to keep.
            trim: characters to remove from the end of the text of the other ids, with the special
                tokens among and after them.
        """
        before = self.join(window)
        pending = incomplete(before)
        is_start = self._strips_space and not before
        parts: list[tuple[bool, str]] = []
        for is_kept, ids in itertools.groupby(new, lambda id_: id_ < 0):
            if is_kept:
                parts += [(True, self._special.get(id_ - KEPT, "")) for id_ in ids]
                continue
            data = pending + self.join(ids)
            text, consumed = codecs.utf_8_decode(data, "replace", False)
            pending = data[consumed:]
            if is_start and text:
                text, is_start = text.removeprefix(" "), False
            parts.append((False, text))
        if final:
            parts.append((False, codecs.utf_8_decode(pending, "replace", True)[0]))
        return _trimmed(parts, trim)

    def window_for(self, ids: Sequence[int], start: int) -> list[int]:
        """The ids before position `start` that the next `delta` needs: at most three.

        Ids without text are skipped, so the result is bounded. The last window suffices:
        window_for(window + new, len(window + new)) is the same.
        """
        window: list[int] = []
        num_bytes = 0
        for position in range(start - 1, -1, -1):
            id_ = ids[position]
            piece = self._pieces[id_] if 0 <= id_ < len(self._pieces) else b""
            if not piece:
                continue
            window.append(id_)
            num_bytes += len(piece)
            if num_bytes >= _MAX_PENDING or not _only_continues(piece):
                break
        window.reverse()
        return window

    def name(self, token_id: int) -> str:
        """A token for display: its text with U+FFFD for incomplete characters, or a special
        token's name."""
        special = self._special.get(token_id)
        return self.join((token_id,)).decode("utf-8", "replace") if special is None else special

    def join(self, ids: Iterable[int]) -> bytes:
        """The concatenated bytes of ids."""
        pieces, end = self._pieces, len(self._pieces)
        return b"".join([pieces[id_] for id_ in ids if 0 <= id_ < end])


def _trimmed(parts: list[tuple[bool, str]], trim: int) -> str:
    """The parts of a text, each with whether it is a special token, without `trim` characters of
    the others at the end."""
    while parts and trim > 0:
        is_kept, text = parts.pop()
        if not is_kept:
            rest = text[:-trim]
            trim -= len(text) - len(rest)
            if rest:
                parts.append((False, rest))
    return "".join(text for _, text in parts)


def incomplete(data: bytes) -> bytes:
    """The incomplete UTF-8 character at the end of `data`, 0 to 3 bytes."""
    tail = data[-_MAX_PENDING:]
    if not tail or tail[-1] < 0x80:
        return b""
    _, consumed = codecs.utf_8_decode(tail, "replace", False)
    return tail[consumed:]


def _only_continues(piece: bytes) -> bool:
    return all(byte & 0xC0 == 0x80 for byte in piece)


def _byte_alphabet() -> str:
    """The character of each byte in GPT-2's alphabet.

    Printable Latin-1 bytes map to themselves, the others to the characters from U+0100 on, in order
    (Radford et al. 2019, `bytes_to_unicode`).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = map(chr, itertools.count(0x100))
    return "".join(chr(byte) if byte in printable else next(others) for byte in range(0x100))


# A character set of the codecs spells a token in one call: vocabularies have 100,000 and more.
_ALPHABET = codecs.charmap_build(_byte_alphabet())


def _spell_byte_level(token: str) -> bytes:
    try:
        return codecs.charmap_encode(token, "strict", _ALPHABET)[0]
    except UnicodeEncodeError:  # an added token is stored as plain text
        return token.encode("utf-8")


def _spell_sentencepiece(token: str) -> bytes:
    # <0x0A>: byte fallback.
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace("\u2581", " ").encode("utf-8")


_REPLACE = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
_SENTENCEPIECE = [_REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"}]


def _family(decoder: dict[str, Any] | None) -> tuple[Any, bool]:
    """The function from a token to its bytes, and whether a text's first space is stripped."""
    steps = [] if decoder is None else decoder.get("decoders", [decoder])
    if [step.get("type") for step in steps] == ["ByteLevel"]:
        return _spell_byte_level, False
    if steps == _SENTENCEPIECE:
        return _spell_sentencepiece, False
    if steps == [*_SENTENCEPIECE, _STRIP]:
        return _spell_sentencepiece, True
    name = " + ".join(str(step.get("type")) for step in steps) or "none"
    raise ConfigError(
        f"tokenizer: decoder {name} is not supported; allowed: ByteLevel, and "
        "Replace(\u2581) + ByteFallback + Fuse with or without Strip(1 space)"
    )
