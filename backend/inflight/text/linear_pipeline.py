"""Tokenizers whose time and memory are known to be linear in the text, from whatever file.

That is those of the families whose pre-tokenizers are known here (`pre_tokenizers`), byte-level or
SentencePiece-like: their regular expressions were measured. Another one may be as harmless, but
that cannot be seen; its texts are encoded in a sandbox, which takes a fraction of a millisecond.
"""

from __future__ import annotations

import json
from typing import Any

import tokenizers

from inflight.text.pre_tokenizers.named import KNOWN_PATTERNS

_MAX_INSERTED = 16
_NORMALIZERS = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip")
_PRE_TOKENIZERS = ("ByteLevel", "Digits", "Metaspace", "Whitespace", "WhitespaceSplit")


def is_linear(backend: tokenizers.Tokenizer) -> bool:
    """Whether all parts that encode a text are known."""
    return (
        _is_known_model(backend.model)
        and _is_known(_state(backend.normalizer))
        and _is_known(_state(backend.pre_tokenizer))
        and _is_known(_state(backend.post_processor))
    )


def _is_known_model(model: Any) -> bool:
    if not isinstance(model, tokenizers.models.BPE):
        return False
    added = (model.continuing_subword_prefix, model.end_of_word_suffix)
    return all(text is None or len(text) <= _MAX_INSERTED for text in added)


def _state(part: Any) -> dict[str, Any] | None:
    return None if part is None else json.loads(part.__getstate__())


def _is_known(part: dict[str, Any] | None) -> bool:
    """Whether a normalizer, pre-tokenizer or post-processor, as in tokenizer.json, is known."""
    if part is None:
        return True
    kind = part.get("type")
    if kind == "Sequence":
        parts = [*part.get("normalizers", ()), *part.get("pretokenizers", ())]
        parts += part.get("processors", ())
        return len(parts) <= _MAX_INSERTED and all(map(_is_known, parts))
    if kind == "Split":
        pattern = part.get("pattern", {})
        return "String" in pattern or pattern.get("Regex") in KNOWN_PATTERNS
    if kind == "Replace":
        text = part.get("pattern", {}).get("String", "")
        return bool(text) and len(part.get("content", "")) <= len(text)
    if kind == "Prepend":
        return len(part.get("prepend", "")) <= _MAX_INSERTED
    if kind == "TemplateProcessing":
        return len(part.get("single", ())) <= _MAX_INSERTED
    return kind in _NORMALIZERS or kind in _PRE_TOKENIZERS
