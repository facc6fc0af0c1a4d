"""What a client may ask of the choice of tokens, and the bounds of each wish."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import msgspec

from inflight.errors import RequestError

MAX_STOP_WORDS = 16
MAX_STOP_WORD_BYTES = 256
MAX_BAD_WORDS = 64
MAX_TOKENS_LIMIT = 2**31 - 1
MAX_TEMPERATURE = 100.0
MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_ALLOWED_TOKENS = 1 << 16
MAX_NGRAM_SIZE = 64
MAX_TOP_N_SIGMA = 100.0
MAX_XTC_THRESHOLD = 0.5
MAX_DRY_MULTIPLIER = 100.0
MAX_DRY_BASE = 10.0
MAX_DRY_BREAKERS = 32
DRY_SEQUENCE_BREAKERS = ("\n", ":", '"', "*")
MAX_LOGPROBS = 20
MAX_BEAM_WIDTH = 16
MAX_LENGTH_PENALTY = 10.0
# Below this a softmax in float32 is a one-hot (or a division by zero): it means greedy.
GREEDY_TEMPERATURE = 1e-5


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the next token is chosen and when to stop. Order of the steps:

    1. repetition, presence and frequency penalties
    2. logit_bias and DRY, which add to logits
    3. allowed_token_ids, bad words, no_repeat_ngram_size and min_tokens, which ban tokens
    4. temperature
    5. top_n_sigma -> top_k -> typical_p -> top_p -> min_p -> XTC, each of what those before left
    6. draw

    Penalties see the model's own logits, as everywhere: a bias that came first would be scaled by
    repetition_penalty. What adds and what bans may go in any order among itself: sums are the same,
    and a banned token stays banned. The filters stand in llama.cpp's order, which begins with those
    that look at logits alone and ends with XTC, as that must see which tokens are good enough to be
    dropped; temperature comes before them as in vLLM, Transformers and exllama, so that
    probabilities are those that are drawn with. (top_n_sigma and top_k are the same before and
    after it.) A log-probability that is reported is the model's own, before all of them.

    Attributes:
        max_tokens: output tokens at most; 0 computes the prompt and chooses nothing; None means the
            engine's default.
        min_tokens: no end-of-sequence token before this many output tokens.
        temperature: 0 is greedy. None is greedy too, unless a filter (step 5) or a seed asks for a
            draw, and 1.0 then.
        top_k: keep the k likeliest tokens; 0 and -1 keep all.
        top_p: keep the likeliest tokens that together have this probability, in (0, 1].
        min_p: keep tokens with at least min_p times the likeliest one's probability, in [0, 1).
        typical_p: keep the tokens whose surprise is nearest to the mean, as few as together have
            this probability, in (0, 1] (arXiv:2202.00666).
        top_n_sigma: keep logits at most so many standard deviations of all logits below the
            largest; 0 keeps all (arXiv:2411.07641).
        xtc_threshold, xtc_probability: "exclude top choices": with this probability, of the tokens
            at least as likely as the threshold, keep the unlikeliest alone, and all below it.
        repetition_penalty: > 0; divides positive and multiplies negative logits of tokens that
            stand in prompt or output (CTRL, arXiv:1909.05858).
        presence_penalty: in [-2, 2]; subtracted once from tokens that stand in the output.
        frequency_penalty: in [-2, 2]; subtracted per occurrence in the output.
        dry_multiplier: "don't repeat yourself" (p-e-w, text-generation-webui 5677): a token that
            would continue a repetition of n >= dry_allowed_length tokens of prompt and output loses
            dry_multiplier * dry_base ** (n - dry_allowed_length). 0 is off.
        dry_base, dry_allowed_length: see dry_multiplier.
        dry_penalty_last_n: DRY looks at so many last tokens; -1 is all, 0 is off.
        dry_sequence_breakers: no repetition reaches across a token whose text has one of these
            strings in it, nor across an end-of-sequence token; None is DRY_SEQUENCE_BREAKERS.
        no_repeat_ngram_size: no string of so many tokens stands twice in prompt and output; 0 is
            off.
        logit_bias: (token id, what is added to its logit), each id once.
        allowed_token_ids: no token but these; () allows all. An end-of-sequence token that is not
            among them never comes.
        seed: with the same seed, the same text, whatever else is in the batch. None: a fresh one.
        stop_words: strings that end the output and are not part of it.
        bad_words: strings whose tokens are never generated.
        ignore_eos: go on past the end-of-sequence token.
        end_id: a further end-of-sequence token; None for the model's own only.
        num_logprobs: report the log-probability of each output token, and of so many likeliest
            ones; None reports nothing.
        num_prompt_logprobs: the same of each prompt token after the first. The prompt is then
            computed, whatever of it stands in the prefix cache.
        beam_width: outputs that are followed side by side in a beam search (see `beams`), which
            looks for the likeliest output as a whole; 1 is none. The steps above are not taken
            then, but for bans: beams are compared by the model's own log-probabilities.
        length_penalty: a beam that has ended is worth its log-probability / length ** this.
        early_stopping: a beam search ends as soon as beam_width beams have; otherwise when no other
            one looks better.

    Raises:
        RequestError: a value out of its bounds, or one that another one contradicts; names it.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_threshold: float = 0.1
    xtc_probability: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] | None = None
    no_repeat_ngram_size: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    stop_words: tuple[str, ...] = ()
    bad_words: tuple[str, ...] = ()
    ignore_eos: bool = False
    end_id: int | None = None
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    beam_width: int = 1
    length_penalty: float = 1.0
    early_stopping: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _check_range("max_tokens", self.max_tokens, 0, MAX_TOKENS_LIMIT)
        _check_range("min_tokens", self.min_tokens, 0, MAX_TOKENS_LIMIT)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"{self.min_tokens} is more than max_tokens ({self.max_tokens})", "min_tokens"
            )
        if self.temperature is not None:
            _check_range("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        self._check_filters()
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 10.0, open_low=True)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        self._check_repetition()
        self._check_tokens()
        if self.seed is not None:
            _check_range("seed", self.seed, 0, 2**64 - 1)
        _check_words("stop_words", self.stop_words, MAX_STOP_WORDS)
        _check_words("bad_words", self.bad_words, MAX_BAD_WORDS)
        for name in ("num_logprobs", "num_prompt_logprobs"):
            if (number := getattr(self, name)) is not None:
                _check_range(name, number, 0, MAX_LOGPROBS)
        self._check_beams()

    def check_vocabulary(self, vocab_size: int) -> None:
        """Hold the token ids against a model's vocabulary.

        Raises:
            RequestError: one is not in it; names the field.
        """
        if self.end_id is not None:
            _check_ids("end_id", (self.end_id,), vocab_size)
        _check_ids("logit_bias", (token_id for token_id, _ in self.logit_bias), vocab_size)
        _check_ids("allowed_token_ids", self.allowed_token_ids, vocab_size)

    @property
    def effective_temperature(self) -> float:
        """The temperature that is meant: 0.0 is greedy (see the class)."""
        if self.temperature is None:
            drawn = (
                self.top_k > 1
                or self.top_p < 1.0
                or self.min_p > 0.0
                or self.has_rare_filters
                or self.seed is not None
            )
            return 1.0 if drawn else 0.0
        return self.temperature if self.temperature >= GREEDY_TEMPERATURE else 0.0

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def has_filters(self) -> bool:
        """Whether a draw is from less than the vocabulary."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0 or self.has_rare_filters

    @property
    def has_rare_filters(self) -> bool:
        """Whether filters beyond top_k, top_p and min_p cut."""
        return self.typical_p < 1.0 or self.top_n_sigma > 0.0 or self.xtc_probability > 0.0

    @property
    def has_dry(self) -> bool:
        return self.dry_multiplier > 0.0 and self.dry_penalty_last_n != 0

    def _check_filters(self) -> None:
        _check_range("top_k", self.top_k, -1, 2**31 - 1)
        _check_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_range("min_p", self.min_p, 0.0, 1.0, open_high=True)
        _check_range("typical_p", self.typical_p, 0.0, 1.0, open_low=True)
        _check_range("top_n_sigma", self.top_n_sigma, 0.0, MAX_TOP_N_SIGMA)
        # Two tokens cannot both have more than a half.
        _check_range("xtc_threshold", self.xtc_threshold, 0.0, MAX_XTC_THRESHOLD)
        _check_range("xtc_probability", self.xtc_probability, 0.0, 1.0)
        if self.temperature is not None and self.temperature < GREEDY_TEMPERATURE:
            for name, cuts in (
                ("typical_p", self.typical_p < 1.0),
                ("xtc_probability", self.xtc_probability > 0.0),
            ):
                if cuts:
                    raise RequestError(
                        "may drop the most probable token, which temperature 0 selects; "
                        f"allowed: {name} with a temperature above 0",
                        name,
                    )

    def _check_repetition(self) -> None:
        _check_range("dry_multiplier", self.dry_multiplier, 0.0, MAX_DRY_MULTIPLIER)
        _check_range("dry_base", self.dry_base, 1.0, MAX_DRY_BASE)
        _check_range("dry_allowed_length", self.dry_allowed_length, 1, MAX_NGRAM_SIZE)
        _check_range("dry_penalty_last_n", self.dry_penalty_last_n, -1, MAX_TOKENS_LIMIT)
        if self.dry_sequence_breakers is not None:
            _check_words("dry_sequence_breakers", self.dry_sequence_breakers, MAX_DRY_BREAKERS)
        if self.no_repeat_ngram_size == 1:
            raise RequestError(
                "1 would ban every token of the prompt; allowed: 0, which is off, and "
                f"[2, {MAX_NGRAM_SIZE}]",
                "no_repeat_ngram_size",
            )
        _check_range("no_repeat_ngram_size", self.no_repeat_ngram_size, 0, MAX_NGRAM_SIZE)

    def _check_beams(self) -> None:
        _check_range("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        _check_range("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        if self.beam_width == 1:
            return
        if self.max_tokens == 0:
            raise RequestError(
                "cannot be combined with max_tokens 0, which generates nothing", "beam_width"
            )
        if self.num_prompt_logprobs is not None:
            raise RequestError(
                f"cannot be combined with beam_width {self.beam_width}; allowed with it: "
                "num_logprobs, of the outputs",
                "num_prompt_logprobs",
            )
        if self.effective_temperature > 0.0:
            name = next(
                name
                for name in ("temperature", "seed", "top_k", "top_p", "min_p", *_RARE_FILTERS)
                if getattr(self, name) != _DEFAULTS[name]
            )
            raise RequestError(
                f"asks for a draw, and beam_width {self.beam_width} for the likeliest outputs; "
                "allowed: one of them, or temperature 0",
                name,
            )
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"):
            self._check_without_beams(name, getattr(self, name) != _DEFAULTS[name])
        self._check_without_beams("dry_multiplier", self.has_dry)
        self._check_without_beams("allowed_token_ids", bool(self.allowed_token_ids))

    def _check_without_beams(self, name: str, is_set: bool) -> None:
        if is_set:
            raise RequestError(
                f"cannot be combined with beam_width {self.beam_width}: beams are compared by "
                "the model's own probabilities; allowed with it: min_tokens, bad_words and "
                "no_repeat_ngram_size",
                name,
            )

    def _check_tokens(self) -> None:
        if self.end_id is not None:
            _check_ids("end_id", (self.end_id,))
        if len(self.logit_bias) > MAX_LOGIT_BIASES:
            raise RequestError(
                f"{len(self.logit_bias)} tokens are too many; allowed: {MAX_LOGIT_BIASES}",
                "logit_bias",
            )
        _check_ids("logit_bias", (token_id for token_id, _ in self.logit_bias))
        for _, bias in self.logit_bias:
            _check_range("logit_bias", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
        if len({token_id for token_id, _ in self.logit_bias}) < len(self.logit_bias):
            raise RequestError("a token id occurs twice; allowed: once each", "logit_bias")
        if len(self.allowed_token_ids) > MAX_ALLOWED_TOKENS:
            raise RequestError(
                f"{len(self.allowed_token_ids)} tokens are too many; allowed: {MAX_ALLOWED_TOKENS}",
                "allowed_token_ids",
            )
        _check_ids("allowed_token_ids", self.allowed_token_ids)


_RARE_FILTERS = ("typical_p", "top_n_sigma", "xtc_probability")
_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}


def _check_ids(name: str, token_ids: Iterable[int], vocab_size: int | None = None) -> None:
    for token_id in token_ids:
        if token_id < 0 or token_id > MAX_TOKENS_LIMIT:
            raise RequestError(f"{token_id} is not a token id; allowed: 0 or more", name)
        if vocab_size is not None and token_id >= vocab_size:
            raise RequestError(
                f"{token_id} is not in the vocabulary; allowed: 0 to {vocab_size - 1}", name
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
