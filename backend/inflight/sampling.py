"""What a client may ask of the choice of tokens, and the bounds of each wish."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from inflight.errors import RequestError

MAX_STOP_WORDS = 16
MAX_STOP_WORD_BYTES = 256
MAX_BAD_WORDS = 64
MAX_TOKENS_LIMIT = 2**31 - 1
MAX_TEMPERATURE = 100.0
# Below this a softmax in float32 is a one-hot (or a division by zero): it means greedy.
GREEDY_TEMPERATURE = 1e-5


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the next token is chosen and when to stop. Order of the steps:

    penalties -> bad words and min_tokens masks -> temperature -> top_k -> top_p -> min_p -> draw.

    Attributes:
        max_tokens: output tokens at most; None means the engine's default.
        min_tokens: no end-of-sequence token before this many output tokens.
        temperature: 0 is greedy. None is greedy too, unless top_k, top_p, min_p or a seed asks
            for a draw, and 1.0 then.
        top_k: keep the k likeliest tokens; 0 and -1 keep all.
        top_p: keep the likeliest tokens that together have this probability, in (0, 1].
        min_p: keep tokens with at least min_p times the likeliest one's probability, in [0, 1).
        repetition_penalty: > 0; divides positive and multiplies negative logits of tokens that
            stand in prompt or output (CTRL, arXiv:1909.05858).
        presence_penalty: in [-2, 2]; subtracted once from tokens that stand in the output.
        frequency_penalty: in [-2, 2]; subtracted per occurrence in the output.
        seed: with the same seed, the same text, whatever else is in the batch. None: a fresh one.
        stop_words: strings that end the output and are not part of it.
        bad_words: strings whose tokens are never generated.
        ignore_eos: go on past the end-of-sequence token.
        end_id: a further end-of-sequence token; None for the model's own only.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop_words: tuple[str, ...] = ()
    bad_words: tuple[str, ...] = ()
    ignore_eos: bool = False
    end_id: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _check_range("max_tokens", self.max_tokens, 1, MAX_TOKENS_LIMIT)
        _check_range("min_tokens", self.min_tokens, 0, MAX_TOKENS_LIMIT)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"{self.min_tokens} is more than max_tokens ({self.max_tokens})", "min_tokens"
            )
        if self.temperature is not None:
            _check_range("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _check_range("top_k", self.top_k, -1, 2**31 - 1)
        _check_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_range("min_p", self.min_p, 0.0, 1.0, open_high=True)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 10.0, open_low=True)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _check_range("seed", self.seed, 0, 2**64 - 1)
        if self.end_id is not None and self.end_id < 0:
            raise RequestError(f"{self.end_id} is not a token id; allowed: 0 or more", "end_id")
        _check_words("stop_words", self.stop_words, MAX_STOP_WORDS)
        _check_words("bad_words", self.bad_words, MAX_BAD_WORDS)

    @property
    def effective_temperature(self) -> float:
        """The temperature that is meant: 0.0 is greedy (see the class)."""
        if self.temperature is None:
            drawn = self.top_k > 1 or self.top_p < 1.0 or self.min_p > 0.0 or self.seed is not None
            return 1.0 if drawn else 0.0
        return self.temperature if self.temperature >= GREEDY_TEMPERATURE else 0.0

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


def _check_range(
    name: str,
    value: Any,
    low: float,
    high: float,
    *,
    open_low: bool = False,
    open_high: bool = False,
) -> None:
    finite = not isinstance(value, float) or math.isfinite(value)
    above = value > low if open_low else value >= low
    below = value < high if open_high else value <= high
    if not (finite and above and below):
        interval = f"{'(' if open_low else '['}{low}, {high}{')' if open_high else ']'}"
        raise RequestError(f"{value} is out of range; allowed: {interval}", name)


def _check_words(name: str, words: tuple[str, ...], limit: int) -> None:
    if len(words) > limit:
        raise RequestError(f"{len(words)} strings are too many; allowed: {limit}", name)
    for word in words:
        size = len(word.encode("utf-8", "surrogatepass"))
        if not 1 <= size <= MAX_STOP_WORD_BYTES:
            raise RequestError(
                f"a string of {size} bytes; allowed: 1 to {MAX_STOP_WORD_BYTES} bytes each", name
            )
