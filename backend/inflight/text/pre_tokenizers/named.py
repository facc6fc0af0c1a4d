"""Pre-tokenizers by the names that GGUF files give them (`tokenizer.ggml.pre`).

Source: the published tokenizer.json of each family.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import Regex, pre_tokenizers

from inflight.text.pre_tokenizers import deepseek

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
)
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|"
    rf"\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|"
    rf"\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_SEED = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|" + _SPACES
# For files without tokenizer.ggml.pre, from older converters.
_UNNAMED = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")

KNOWN_PATTERNS = frozenset(
    {_GPT2, _LLAMA3, _QWEN2, _TEKKEN, _GPT4O, _SEED, *_UNNAMED} | {*deepseek.CODER, *deepseek.V3}
)
"""Regular expressions whose time was measured to be linear in the text."""


def _split(*patterns: str) -> pre_tokenizers.PreTokenizer:
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_apart() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _llama3() -> pre_tokenizers.PreTokenizer:
    return _split(_LLAMA3)


def _qwen2() -> pre_tokenizers.PreTokenizer:
    return _split(_QWEN2)


def _tekken() -> pre_tokenizers.PreTokenizer:
    return _split(_TEKKEN)


def _gpt4o() -> pre_tokenizers.PreTokenizer:
    return _split(_GPT4O)


def _seed() -> pre_tokenizers.PreTokenizer:
    return _split(_SEED)


def _deepseek_llm() -> pre_tokenizers.PreTokenizer:
    return _split(*deepseek.LLM)


def _deepseek_coder() -> pre_tokenizers.PreTokenizer:
    return _split(*deepseek.CODER)


def _deepseek_v3() -> pre_tokenizers.PreTokenizer:
    return _split(*deepseek.V3)


def _unnamed() -> pre_tokenizers.PreTokenizer:
    return _split(*_UNNAMED)


PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": _unnamed,
    "gpt-2": _gpt2,
    "olmo": _gpt2,
    "exaone4": _gpt2,
    "smollm": _digits_apart,
    "starcoder": _digits_apart,
    "refact": _digits_apart,
    "command-r": _digits_apart,
    "exaone": _digits_apart,
    "llama-bpe": _llama3,
    "llama3": _llama3,
    "llama-v3": _llama3,
    "dbrx": _llama3,
    "smaug-bpe": _llama3,
    "glm4": _llama3,
    "chatglm-bpe": _llama3,
    "qwen2": _qwen2,
    "deepseek-r1-qwen": _qwen2,
    "deepseek-llm": _deepseek_llm,
    "deepseek-coder": _deepseek_coder,
    "deepseek-v3": _deepseek_v3,
    "stablelm2": _qwen2,
    "gpt-4o": _gpt4o,
    "seed-coder": _seed,
    "tekken": _tekken,
}
