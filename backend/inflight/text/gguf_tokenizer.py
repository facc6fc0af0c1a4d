"""Converts the tokenizer of a GGUF file to the files of a Hugging Face folder.

Sources: the GGUF specification (ggml, docs/gguf.md) for the keys; the published tokenizer.json of
each family for its pre-tokenizer. Only metadata is read, no tensors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from inflight.errors import ConfigError
from inflight.text.chat_format import builtin_templates, named_templates, stop_tokens
from inflight.text.pre_tokenizers.named import PRE_TOKENIZERS

# tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

# A pre-token that is in the vocabulary is one token, whatever the merges.
_IGNORES_MERGES = {"llama-bpe", "llama3", "llama-v3", "tekken"}
_BEGINS_WITH_BOS = {"llama-bpe", "llama3", "llama-v3", "tekken"}
_NORMALIZES = {"qwen2", "deepseek-r1-qwen"}
_MODELS = ("gpt2", "llama")
# Phi-3's tokens swallow the white space after them, but for these.
_KEEP_SPACE = ("<unk>", "<s>", "<|endoftext|>")


def read(path: Path) -> dict[str, Any]:
    """All metadata of a GGUF file, key -> value; arrays are lists.

    Raises:
        ConfigError: it cannot be read or is not a GGUF file.
    """
    # Takes 40 ms to import, and most processes find the tokenizer in the cache.
    from inflight.checkpoint.gguf import GgufArray, GgufFile

    file = GgufFile(path)
    return {
        key: file.items(value) if isinstance(value, GgufArray) else value
        for key, value in file.metadata.items()
    }


def has_tokenizer(metadata: dict[str, Any]) -> bool:
    """Whether there is a tokenizer of any type."""
    return "tokenizer.ggml.tokens" in metadata


def write_folder(path: Path, metadata: dict[str, Any], folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json, config.json and generation_config.json.

    Args:
        path: of the GGUF file, for errors.
        metadata: of the file, as returned by `read`.
        folder: must exist.

    Raises:
        ConfigError: the tokenizer is missing, corrupt or not supported.
        OSError: the folder cannot be written.
    """
    try:
        backend = build(metadata)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    tokens = metadata["tokenizer.ggml.tokens"]
    special = _special(metadata)
    eos_ids = _eos_ids(metadata, special)
    backend.save(str(folder / "tokenizer.json"))
    texts = {
        name: tokens[id_]
        for name, id_ in (
            ("bos_token", _token_id(metadata, "bos")),
            ("eos_token", _token_id(metadata, "eos")),
            ("unk_token", _token_id(metadata, "unknown")),
            ("pad_token", _token_id(metadata, "padding")),
        )
        if id_ is not None
    }
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **texts,
            "clean_up_tokenization_spaces": False,
            "model_max_length": _number(metadata, "context_length"),
            "chat_template": _chat_template(metadata, special),
        },
    )
    eos = eos_ids[0] if len(eos_ids) == 1 else list(eos_ids)
    ends = {"bos_token_id": _token_id(metadata, "bos"), "eos_token_id": eos or None}
    _write_json(folder / "config.json", {**_config(metadata), **ends})
    _write_json(folder / "generation_config.json", ends)


def _chat_template(metadata: dict[str, Any], special: dict[str, int]) -> Any:
    """The template, or several under names; a built-in one if the file has none."""
    templates = named_templates.of_gguf(metadata)
    if not templates:
        return builtin_templates.find(metadata.get("general.architecture"), special)
    return named_templates.in_config(templates)


def build(metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer that GGUF metadata describes.

    Args:
        metadata: key -> value; arrays are lists.

    Raises:
        ConfigError: a key is missing or its value is not supported.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in _MODELS:
        raise ConfigError(
            f"tokenizer.ggml.model: {kind!r} is not supported; allowed: {', '.join(_MODELS)}"
        )
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ConfigError("tokenizer.ggml.tokens is missing or empty")
    vocabulary = {token: id_ for id_, token in enumerate(tokens)}
    types = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ConfigError(
            f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens"
        )
    make = _byte_level if kind == "gpt2" else _sentencepiece
    backend, begins = make(metadata, vocabulary, types)
    backend.add_tokens(_added_tokens(metadata, types))
    # The file's setting takes precedence.
    begins = bool(metadata.get("tokenizer.ggml.add_bos_token", begins))
    ends = bool(metadata.get("tokenizer.ggml.add_eos_token", False))
    around = [
        (tokens[id_], id_) if wanted and id_ is not None else None
        for wanted, id_ in (
            (begins, _token_id(metadata, "bos")),
            (ends, _token_id(metadata, "eos")),
        )
    ]
    bos, eos = around
    if bos or eos:
        single = [*([bos[0]] if bos else []), "$A", *([eos[0]] if eos else [])]
        backend.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[part for part in around if part]
        )
    return backend


def _added_tokens(metadata: dict[str, Any], types: list[int]) -> list[AddedToken]:
    """The tokens that are found in a text before anything else."""
    is_sentencepiece = metadata["tokenizer.ggml.model"] == "llama"
    special = (_CONTROL, _UNKNOWN) if is_sentencepiece else (_CONTROL,)
    is_phi3 = is_sentencepiece and metadata.get("general.architecture") == "phi3"
    # Gemma's runs of spaces are found where U+2581 stands for a space. With a prefix space, the
    # library would add it to them, too.
    has_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    return [
        AddedToken(
            token,
            normalized=is_sentencepiece and not has_prefix and type_ == _USER_DEFINED,
            special=type_ in special,
            rstrip=is_phi3 and token not in _KEEP_SPACE,
        )
        for token, type_ in zip(metadata["tokenizer.ggml.tokens"], types, strict=True)
        if token and type_ in (*special, _USER_DEFINED)
    ]


def _byte_level(
    metadata: dict[str, Any], vocabulary: dict[str, int], types: list[int]
) -> tuple[tokenizers.Tokenizer, bool]:
    """GPT-2's byte-level BPE, and whether prompts begin with BOS by default."""
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise ConfigError(
            f"tokenizer.ggml.pre: {pre!r} is not supported; allowed: {', '.join(PRE_TOKENIZERS)}"
        )
    merges = []
    for merge in metadata.get("tokenizer.ggml.merges") or []:
        left, space, right = merge.partition(" ")
        if not (left and space and right) or " " in right:
            raise ConfigError(f"tokenizer.ggml.merges: {merge!r} is not two tokens")
        merges.append((left, right))
    backend = _assemble(vocabulary, merges, ignore_merges=pre in _IGNORES_MERGES)
    if pre in _NORMALIZES:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    return backend, pre in _BEGINS_WITH_BOS


def _sentencepiece(
    metadata: dict[str, Any], vocabulary: dict[str, int], types: list[int]
) -> tuple[tokenizers.Tokenizer, bool]:
    """SentencePiece BPE: scores instead of merges, U+2581 for a space, byte fallback."""
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(types):
        raise ConfigError("tokenizer.ggml.scores must have one entry per token")
    unknown = _token_id(metadata, "unknown")
    backend = _assemble(
        vocabulary,
        _merges(vocabulary, types, scores),
        unk_token=None if unknown is None else metadata["tokenizer.ggml.tokens"][unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    # A prefix space before each text, also after a special token, as in these models' training.
    # (Newer Hugging Face folders differ, but are not read here.)
    prefixed = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", "\u2581")
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend("\u2581"), spaces])
        if prefixed
        else normalizers.Sequence([spaces])
    )
    steps: list[Any] = [
        decoders.Replace("\u2581", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    return backend, True


def _assemble(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any
) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **options))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"tokenizer.ggml: merges and tokens do not match: {error}") from None


def _merges(
    vocabulary: dict[str, int], types: list[int], scores: list[float]
) -> list[tuple[str, str]]:
    """The merges implied by scores: every pair that forms a token, highest score first.

    SentencePiece merges the adjacent pair whose union has the highest score. Control and byte
    tokens are excluded: text never becomes one.
    """
    textual = {
        token: id_ for token, id_ in vocabulary.items() if types[id_] in (_NORMAL, _USER_DEFINED)
    }
    found: list[tuple[float, int, int, str, str]] = []
    for token, id_ in textual.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in textual and right in textual:
                found.append((-scores[id_], textual[left], textual[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _token_id(metadata: dict[str, Any], name: str) -> int | None:
    id_ = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return id_ if isinstance(id_, int) and id_ < len(metadata["tokenizer.ggml.tokens"]) else None


def _special(metadata: dict[str, Any]) -> dict[str, int]:
    """Text -> id of the tokens that may delimit turns."""
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata.get("tokenizer.ggml.token_type") or []
    return {tokens[i]: i for i, type_ in enumerate(types) if type_ in (_CONTROL, _USER_DEFINED)}


def _eos_ids(metadata: dict[str, Any], special: dict[str, int]) -> tuple[int, ...]:
    named = (_token_id(metadata, name) for name in ("eos", "eot", "eom"))
    found = stop_tokens.in_vocabulary(special, _token_id(metadata, "unknown"))
    return tuple(dict.fromkeys(id_ for id_ in (*named, *found) if id_ is not None))


def _number(metadata: dict[str, Any], key: str) -> Any:
    return metadata.get(f"{metadata.get('general.architecture')}.{key}")


def _config(metadata: dict[str, Any]) -> dict[str, Any]:
    """The settings of config.json that tools read, under their names there."""
    architecture = metadata.get("general.architecture")
    heads = _number(metadata, "attention.head_count")
    return {
        "model_type": architecture,
        "vocab_size": _number(metadata, "vocab_size") or len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": _number(metadata, "embedding_length"),
        "intermediate_size": _number(metadata, "feed_forward_length"),
        "num_hidden_layers": _number(metadata, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _number(metadata, "attention.head_count_kv") or heads,
        "max_position_embeddings": _number(metadata, "context_length"),
        "rope_theta": _number(metadata, "rope.freq_base"),
        "rms_norm_eps": _number(metadata, "attention.layer_norm_rms_epsilon"),
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    known = {key: item for key, item in value.items() if item is not None}
    path.write_text(json.dumps(known, ensure_ascii=False, indent=2) + "\n", "utf-8")
