"""Sampling parameters and stop conditions: the request options that concern sampling.

The annotated fields of `SamplingParams` are one half of the table of request options (see
`sampling.options`). A new option is a field here, and its effect in `torch_ops.sampling` or
`sampling.logit_adjustments` and in the kernels.
"""

from __future__ import annotations

import operator
from typing import Annotated, Any

import msgspec

from inflight.errors import RequestError
from inflight.sampling.options import (
    MAX_TOKEN_ID,
    Option,
    Stage,
    check_options,
    check_token_ids,
    option_fields,
)

MAX_STOP_WORDS = 16
MAX_BAD_WORDS = 64
MAX_TOKENS_LIMIT = MAX_TOKEN_ID
WHOLE_CONTEXT = -1
"""As max_tokens: what the context and the KV cache have left after the prompt."""

MAX_STOP_TOKENS = 1024
MAX_TEMPERATURE = 100.0
MAX_LOGIT_BIASES = 1024
MAX_ALLOWED_TOKENS = 1 << 16
MAX_NGRAM_SIZE = 64
MAX_DRY_BREAKERS = 32
DRY_SEQUENCE_BREAKERS = ("\n", ":", '"', "*")
MAX_LOGPROBS = 20
MAX_BEAM_WIDTH = 16
# Below this a softmax in float32 is one-hot (or divides by zero): treated as greedy.
GREEDY_TEMPERATURE = 1e-5


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sampling parameters and stop conditions. Order of the steps:

    1. repetition, presence and frequency penalties
    2. logit_bias and DRY, which add to logits
    3. allowed_token_ids, bad words, no_repeat_ngram_size and min_tokens, which ban tokens
    4. temperature
    5. top_n_sigma, top_k, typical_p, top_p, min_p, epsilon_cutoff, XTC: each filters the rest
    6. sampling

    Penalties apply to the raw logits, as in other engines: a bias before them would be scaled by
    repetition_penalty. The order among additions and among bans does not matter. The filters are in
    llama.cpp's order, which starts with those on logits and ends with XTC, as that depends on which
    tokens are good enough to be dropped; temperature precedes them as in vLLM, Transformers and
    exllama, so that they use the probabilities of sampling. (top_n_sigma and top_k are the same
    before and after it.) Reported logprobs are the model's own, before all of these.

    Raises:
        RequestError: a value is out of its bounds, or contradicts another one; names it.
    """

    max_tokens: Annotated[
        int | None,
        Option(
            "Maximum number of output tokens. -1 is as many as the context allows. 0, with `echo` "
            "or `num_prompt_logprobs`, computes the prompt and generates nothing.",
            low=WHOLE_CONTEXT,
            high=MAX_TOKENS_LIMIT,
            default="the engine's `default_max_tokens`",
        ),
    ] = None
    min_tokens: Annotated[
        int,
        Option(
            "No end-of-sequence token before this many output tokens.",
            low=0,
            high=MAX_TOKENS_LIMIT,
            aliases=("min_length",),
        ),
    ] = 0
    temperature: Annotated[
        float | None,
        Option(
            "Logits are divided by it before sampling; 0 is greedy.",
            low=0.0,
            high=MAX_TEMPERATURE,
            default="1 with a `seed` or a filter (`top_k` above 1, `top_p`, `min_p`, `typical_p`, "
            "`top_n_sigma`, `epsilon_cutoff`, `xtc_probability`), else 0",
        ),
    ] = None
    top_k: Annotated[
        int,
        Option(
            "Sample from the k most probable tokens. 0 and -1 keep all.",
            low=-1,
            high=2**31 - 1,
            stage="filter",
        ),
    ] = 0
    top_p: Annotated[
        float,
        Option(
            "Sample from the most probable tokens that together have this probability.",
            low=0.0,
            high=1.0,
            open_low=True,
            stage="filter",
        ),
    ] = 1.0
    min_p: Annotated[
        float,
        Option(
            "Sample from tokens with at least `min_p` times the probability of the most probable "
            "one.",
            low=0.0,
            high=1.0,
            open_high=True,
            stage="filter",
        ),
    ] = 0.0
    typical_p: Annotated[
        float,
        Option(
            "Sample from the tokens whose surprisal is closest to the entropy, as few as together "
            "have this probability (arXiv:2202.00666).",
            low=0.0,
            high=1.0,
            open_low=True,
            stage="rare filter",
        ),
    ] = 1.0
    top_n_sigma: Annotated[
        float,
        Option(
            "Sample from logits at most this many standard deviations of all logits below the "
            "largest (arXiv:2411.07641). 0 keeps all.",
            low=0.0,
            high=100.0,
            stage="rare filter",
        ),
    ] = 0.0
    epsilon_cutoff: Annotated[
        float,
        Option(
            "Sample from tokens with at least this probability, or the most probable one if none "
            "has it (arXiv:2210.15191). 0 keeps all.",
            low=0.0,
            high=1.0,
            open_high=True,
            stage="rare filter",
        ),
    ] = 0.0
    xtc_threshold: Annotated[
        float,
        Option(
            "XTC (exclude top choices): tokens with at least this probability are top choices.",
            low=0.0,
            high=0.5,  # two tokens cannot both have more than a half
        ),
    ] = 0.1
    xtc_probability: Annotated[
        float,
        Option(
            "XTC: how often all top choices but the least probable one are excluded.",
            low=0.0,
            high=1.0,
            stage="rare filter",
        ),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        Option(
            "Divides positive and multiplies negative logits of tokens that occur in the prompt or "
            "the output (arXiv:1909.05858). Above 1 makes them less probable.",
            low=0.0,
            high=10.0,
            open_low=True,
            stage="penalty",
        ),
    ] = 1.0
    presence_penalty: Annotated[
        float,
        Option(
            "Subtracted once from the logits of tokens that occur in the output.",
            low=-2.0,
            high=2.0,
            stage="penalty",
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        Option(
            "Subtracted from the logits of tokens for each occurrence in the output.",
            low=-2.0,
            high=2.0,
            stage="penalty",
        ),
    ] = 0.0
    dry_multiplier: Annotated[
        float,
        Option(
            "DRY (don't repeat yourself): a token that would continue a repetition of n >= "
            "`dry_allowed_length` tokens loses `dry_multiplier` * `dry_base` ** (n - "
            "`dry_allowed_length`). 0 is off.",
            low=0.0,
            high=100.0,
        ),
    ] = 0.0
    dry_base: Annotated[
        float,
        Option(
            "DRY: the factor by which the penalty grows with each repeated token.",
            low=1.0,
            high=10.0,
        ),
    ] = 1.75
    dry_allowed_length: Annotated[
        int,
        Option("DRY: shorter repetitions are free.", low=1, high=MAX_NGRAM_SIZE),
    ] = 2
    dry_penalty_last_n: Annotated[
        int,
        Option(
            "DRY looks at this many of the last tokens. -1 is all, 0 is off.",
            low=-1,
            high=MAX_TOKENS_LIMIT,
        ),
    ] = -1
    dry_sequence_breakers: Annotated[
        tuple[str, ...] | None,
        Option(
            "DRY: no repetition extends across a token whose text contains one of these strings, "
            "nor across an end-of-sequence token.",
            max_items=MAX_DRY_BREAKERS,
            default='line break, `:`, `"`, `*`',
        ),
    ] = None
    no_repeat_ngram_size: Annotated[
        int,
        Option(
            "No n-gram of this size occurs twice in prompt and output. 0 is off.",
            low=0,
            high=MAX_NGRAM_SIZE,
        ),
    ] = 0
    logit_bias: Annotated[
        tuple[tuple[int, float], ...],
        Option(
            "Added to the logits of single tokens, each at most once. As tensors, "
            "`logit_bias_ids` has the token ids and `logit_bias_values` the biases.",
            low=-100.0,
            high=100.0,
            max_items=MAX_LOGIT_BIASES,
            token_ids=True,
            tensors=(("logit_bias_ids", "INT32"), ("logit_bias_values", "FP32")),
            with_beams=False,
        ),
    ] = ()
    allowed_token_ids: Annotated[
        tuple[int, ...],
        Option(
            "Only these tokens may be generated. An end-of-sequence token that is not among them "
            "never comes.",
            max_items=MAX_ALLOWED_TOKENS,
            token_ids=True,
            default="all tokens",
            with_beams=False,
        ),
    ] = ()
    seed: Annotated[
        int | None,
        Option(
            "The same seed gives the same text, whatever else is in the batch.",
            low=0,
            high=2**64 - 1,
            datatype="UINT64",
            default="a random one",
        ),
    ] = None
    stop_words: Annotated[
        tuple[str, ...],
        Option(
            "Strings that end the output and are not part of it.",
            max_items=MAX_STOP_WORDS,
            vllm=("stop",),
        ),
    ] = ()
    bad_words: Annotated[
        tuple[str, ...],
        Option("Strings whose tokens are never generated.", max_items=MAX_BAD_WORDS),
    ] = ()
    ignore_eos: Annotated[bool, Option("Continue after the end-of-sequence token.")] = False
    end_id: Annotated[
        int | None,
        Option(
            "A further end-of-sequence token.",
            token_ids=True,
            default="the model's own only",
        ),
    ] = None
    stop_token_ids: Annotated[
        tuple[int, ...],
        Option(
            "Tokens that end the output, also with `ignore_eos`; their text is not part of it.",
            max_items=MAX_STOP_TOKENS,
            token_ids=True,
        ),
    ] = ()
    num_logprobs: Annotated[
        int | None,
        Option(
            "Report, in `logprobs`, the log-probability of each output token and of this many of "
            "the most probable ones.",
            low=0,
            high=MAX_LOGPROBS,
            vllm=("logprobs",),
            default="no report",
        ),
    ] = None
    num_prompt_logprobs: Annotated[
        int | None,
        Option(
            "Report the same, in `prompt_logprobs`, of each prompt token after the first. The "
            "prompt is then computed even if it is in the prefix cache.",
            low=0,
            high=MAX_LOGPROBS,
            vllm=("prompt_logprobs",),
            default="no report",
        ),
    ] = None
    beam_width: Annotated[
        int,
        Option(
            "Beam search: how many outputs are followed side by side; the n most probable as a "
            "whole are the answer. Tokens are then ranked by the model's own log-probabilities. 1 "
            "is no beam search.",
            low=1,
            high=MAX_BEAM_WIDTH,
        ),
    ] = 1
    length_penalty: Annotated[
        float,
        Option(
            "Beam search: a finished beam's score is its log-probability / length ** "
            "`length_penalty`.",
            low=-10.0,
            high=10.0,
        ),
    ] = 1.0
    early_stopping: Annotated[
        bool,
        Option(
            "Beam search: stop as soon as `beam_width` beams are finished, even if another one "
            "could still score higher.",
        ),
    ] = False

    def __post_init__(self) -> None:
        check_options(self, SAMPLING_OPTIONS)
        self._check_lengths()
        self._check_tokens()
        self._check_greedy()
        self._check_beams()

    def check_vocabulary(self, vocab_size: int) -> None:
        """Check the token ids against a model's vocabulary.

        Raises:
            RequestError: one is not in it; names the field.
        """
        if self.end_id is not None:
            check_token_ids("end_id", (self.end_id,), vocab_size)
        check_token_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        check_token_ids("logit_bias", (token_id for token_id, _ in self.logit_bias), vocab_size)
        check_token_ids("allowed_token_ids", self.allowed_token_ids, vocab_size)

    @property
    def effective_temperature(self) -> float:
        """The temperature with its default applied: 0.0 is greedy (see the option)."""
        if self.temperature is None:
            drawn = self.top_k > 1 or _CUTS.values(self) != _CUTS.defaults or self.seed is not None
            return 1.0 if drawn else 0.0
        return self.temperature if self.temperature >= GREEDY_TEMPERATURE else 0.0

    @property
    def has_penalties(self) -> bool:
        return _PENALTIES.values(self) != _PENALTIES.defaults

    @property
    def has_filters(self) -> bool:
        """Whether any filter applies."""
        return self.top_k > 0 or _CUTS.values(self) != _CUTS.defaults

    @property
    def has_rare_filters(self) -> bool:
        """Whether a filter other than top_k, top_p and min_p applies."""
        return _RARE_FILTERS.values(self) != _RARE_FILTERS.defaults

    @property
    def has_dry(self) -> bool:
        return self.dry_multiplier > 0.0 and self.dry_penalty_last_n != 0

    def _check_lengths(self) -> None:
        limit = None if self.max_tokens == WHOLE_CONTEXT else self.max_tokens
        if limit is not None and self.min_tokens > limit:
            raise RequestError(f"{self.min_tokens} is more than max_tokens ({limit})", "min_tokens")
        if self.no_repeat_ngram_size == 1:
            raise RequestError(
                "1 would ban every token of the prompt; allowed: 0, which is off, and "
                f"[2, {MAX_NGRAM_SIZE}]",
                "no_repeat_ngram_size",
            )

    def _check_tokens(self) -> None:
        if len({token_id for token_id, _ in self.logit_bias}) < len(self.logit_bias):
            raise RequestError("a token id occurs twice; allowed: once each", "logit_bias")

    def _check_greedy(self) -> None:
        if self.temperature is None or self.temperature >= GREEDY_TEMPERATURE:
            return
        for name in ("typical_p", "xtc_probability"):
            if getattr(self, name) != _DEFAULTS[name]:
                raise RequestError(
                    "may drop the most probable token, which temperature 0 selects; "
                    f"allowed: {name} with a temperature above 0",
                    name,
                )

    def _check_beams(self) -> None:
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
                for name in ("temperature", "seed", "top_k", *_CUTS.names)
                if getattr(self, name) != _DEFAULTS[name]
            )
            raise RequestError(
                f"requests random sampling, which cannot be combined with beam_width "
                f"{self.beam_width}; allowed: one of them, or temperature 0",
                name,
            )
        for name in _WITHOUT_BEAMS:
            self._check_without_beams(name, getattr(self, name) != _DEFAULTS[name])
        self._check_without_beams("dry_multiplier", self.has_dry)

    def _check_without_beams(self, name: str, is_set: bool) -> None:
        if is_set:
            raise RequestError(
                f"cannot be combined with beam_width {self.beam_width}: beams are ranked by the "
                "model's own probabilities; allowed with it: min_tokens, bad_words and "
                "no_repeat_ngram_size",
                name,
            )


SAMPLING_OPTIONS = option_fields(SamplingParams)
"""The options that concern sampling, in the order of their tensors."""

_DEFAULTS: dict[str, Any] = {field.name: field.default for field in SAMPLING_OPTIONS}


class _Group:
    """Options that are read together, in one call, as every step needs them.

    Attributes:
        names: at least two, so that `values` is a tuple.
        values: getter of their values in a SamplingParams.
        defaults: the values with which none of them has an effect.
    """

    def __init__(self, *stages: Stage) -> None:
        # top_k is switched off by several values.
        self.names = tuple(
            field.name
            for field in SAMPLING_OPTIONS
            if field.option.stage in stages and field.name != "top_k"
        )
        self.values = operator.attrgetter(*self.names)
        self.defaults = tuple(_DEFAULTS[name] for name in self.names)


_PENALTIES = _Group("penalty")
_CUTS = _Group("filter", "rare filter")
_RARE_FILTERS = _Group("rare filter")
_WITHOUT_BEAMS = (
    *_PENALTIES.names,
    *(field.name for field in SAMPLING_OPTIONS if not field.option.with_beams),
)
