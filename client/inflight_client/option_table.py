"""The options of a generation, and the datatypes of their tensors.

Written by `make generate`; do not edit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict


class Options(TypedDict, total=False):
    """Options of a generation; omitted ones use the server's defaults.

    The server checks the ranges; its error names the option.

    logit_bias is token id -> bias. It is sent as the two tensors `logit_bias_ids` and
    `logit_bias_values`. sampling_parameters and guided_decoding_guide are sent as strings; a
    mapping, or a guide given as a list, is encoded as JSON.
    """

    max_tokens: int
    """Maximum number of output tokens."""
    min_tokens: int
    """No end-of-sequence token before this many output tokens."""
    min_length: int
    """Another name of `min_tokens`."""
    temperature: float
    """Logits are divided by it before sampling; 0 is greedy."""
    top_k: int
    """Sample from the k most probable tokens."""
    top_p: float
    """Sample from the most probable tokens that together have this probability."""
    min_p: float
    """Sample from tokens with at least `min_p` times the probability of the most probable one."""
    typical_p: float
    """Sample from the tokens whose surprisal is closest to the entropy, as few as together have
    this probability (arXiv:2202.00666).
    """
    top_n_sigma: float
    """Sample from logits at most this many standard deviations of all logits below the largest
    (arXiv:2411.07641).
    """
    epsilon_cutoff: float
    """Sample from tokens with at least this probability, or the most probable one if none has it
    (arXiv:2210.15191).
    """
    xtc_threshold: float
    """XTC (exclude top choices): tokens with at least this probability are top choices."""
    xtc_probability: float
    """XTC: how often all top choices but the least probable one are excluded."""
    repetition_penalty: float
    """Divides positive and multiplies negative logits of tokens that occur in the prompt or the
    output (arXiv:1909.05858).
    """
    presence_penalty: float
    """Subtracted once from the logits of tokens that occur in the output."""
    frequency_penalty: float
    """Subtracted from the logits of tokens for each occurrence in the output."""
    dry_multiplier: float
    """DRY (don't repeat yourself): a token that would continue a repetition of n >=
    `dry_allowed_length` tokens loses `dry_multiplier` * `dry_base` ** (n - `dry_allowed_length`).
    """
    dry_base: float
    """DRY: the factor by which the penalty grows with each repeated token."""
    dry_allowed_length: int
    """DRY: shorter repetitions are free."""
    dry_penalty_last_n: int
    """DRY looks at this many of the last tokens."""
    dry_sequence_breakers: Sequence[str]
    """DRY: no repetition extends across a token whose text contains one of these strings, nor
    across an end-of-sequence token.
    """
    no_repeat_ngram_size: int
    """No n-gram of this size occurs twice in prompt and output."""
    logit_bias: Mapping[int, float]
    """Added to the logits of single tokens, each at most once."""
    logit_bias_ids: Sequence[int]
    """See `logit_bias`."""
    logit_bias_values: Sequence[float]
    """See `logit_bias`."""
    allowed_token_ids: Sequence[int]
    """Only these tokens may be generated."""
    seed: int
    """The same seed gives the same text, whatever else is in the batch."""
    stop_words: Sequence[str]
    """Strings that end the output and are not part of it."""
    bad_words: Sequence[str]
    """Strings whose tokens are never generated."""
    ignore_eos: bool
    """Continue after the end-of-sequence token."""
    end_id: int
    """A further end-of-sequence token."""
    stop_token_ids: Sequence[int]
    """Tokens that end the output, also with `ignore_eos`; their text is not part of it."""
    num_logprobs: int
    """Report, in `logprobs`, the log-probability of each output token and of this many of the most
    probable ones.
    """
    num_prompt_logprobs: int
    """Report the same, in `prompt_logprobs`, of each prompt token after the first."""
    beam_width: int
    """Beam search: how many outputs are followed side by side; the n most probable as a whole are
    the answer.
    """
    length_penalty: float
    """Beam search: a finished beam's score is its log-probability / length ** `length_penalty`."""
    early_stopping: bool
    """Beam search: stop as soon as `beam_width` beams are finished, even if another one could still
    score higher.
    """
    exclude_input_in_output: bool
    """False prepends the prompt to the output."""
    echo: bool
    """True prepends the prompt to the output."""
    return_num_input_tokens: bool
    """Accepted; the count is always part of the answer."""
    return_num_output_tokens: bool
    """Accepted; the count is always part of the answer."""
    return_finish_reason: bool
    """Accepted; the reason is always part of the answer."""
    return_cumulative_logprob: bool
    """Accepted; the sum is always part of the answer."""
    return_logprobs: bool
    """Accepted; `num_logprobs` decides what is reported."""
    sampling_parameters: str | Mapping[str, Any]
    """Options as one JSON object, under vLLM's names."""
    cache_salt: str
    """Cached prefixes are shared only between requests with the same salt."""
    n: int
    """Outputs per prompt, which is computed once."""
    best_of: int
    """Outputs to compute, of which the n with the highest log-probability per token are the answer.
    """
    skip_special_tokens: bool
    """False keeps the special tokens of an output in its text, but for the one that ends it."""
    keep_special_tokens: Sequence[str]
    """Special tokens of an output that stay in its text, such as `[TOOL_CALLS]`."""
    speculation: str
    """Draft tokens per step."""
    return_log_probs: bool
    """True reports each output token, as `num_logprobs` 0 does."""
    return_timing: bool
    """True reports where the time of each output went: `timing` in `draft_stats`."""
    guided_decoding_guide_type: str
    """What the output must match: any JSON, or a JSON schema, a regular expression, a grammar (GBNF
    or Lark) or one of several strings (a JSON list).
    """
    guided_decoding_guide: str | Mapping[str, Any] | Sequence[str]
    """The schema, expression, grammar or choices."""
    priority_class: str
    """How urgent the request is: while requests of both classes are queued, each has its share of
    the tokens (`interactive_weight` and `batch_weight` of the engine).
    """
    deadline_ms: int
    """Milliseconds from the request's arrival after which nothing is computed for it: it ends with
    an error, wherever it is by then.
    """
    cache_priority: int
    """How long the KV blocks of prompt and output stay in the prefix cache: those of lower priority
    are evicted first.
    """
    cache_ttl_s: float
    """Seconds from the end of the request after which `cache_priority` falls back to its default;
    each later request with the same prefix and option extends it.
    """


# KServe's names of the datatypes. Where dims are [-1] there are lists in `Options`.
DATATYPES: dict[str, str] = {
    "max_tokens": "INT32",
    "min_tokens": "INT32",
    "min_length": "INT32",
    "temperature": "FP32",
    "top_k": "INT32",
    "top_p": "FP32",
    "min_p": "FP32",
    "typical_p": "FP32",
    "top_n_sigma": "FP32",
    "epsilon_cutoff": "FP32",
    "xtc_threshold": "FP32",
    "xtc_probability": "FP32",
    "repetition_penalty": "FP32",
    "presence_penalty": "FP32",
    "frequency_penalty": "FP32",
    "dry_multiplier": "FP32",
    "dry_base": "FP32",
    "dry_allowed_length": "INT32",
    "dry_penalty_last_n": "INT32",
    "dry_sequence_breakers": "BYTES",
    "no_repeat_ngram_size": "INT32",
    "logit_bias_ids": "INT32",
    "logit_bias_values": "FP32",
    "allowed_token_ids": "INT32",
    "seed": "UINT64",
    "stop_words": "BYTES",
    "bad_words": "BYTES",
    "ignore_eos": "BOOL",
    "end_id": "INT32",
    "stop_token_ids": "INT32",
    "num_logprobs": "INT32",
    "num_prompt_logprobs": "INT32",
    "beam_width": "INT32",
    "length_penalty": "FP32",
    "early_stopping": "BOOL",
    "exclude_input_in_output": "BOOL",
    "echo": "BOOL",
    "return_num_input_tokens": "BOOL",
    "return_num_output_tokens": "BOOL",
    "return_finish_reason": "BOOL",
    "return_cumulative_logprob": "BOOL",
    "return_logprobs": "BOOL",
    "sampling_parameters": "BYTES",
    "cache_salt": "BYTES",
    "n": "INT32",
    "best_of": "INT32",
    "skip_special_tokens": "BOOL",
    "keep_special_tokens": "BYTES",
    "speculation": "BYTES",
    "return_log_probs": "BOOL",
    "return_timing": "BOOL",
    "guided_decoding_guide_type": "BYTES",
    "guided_decoding_guide": "BYTES",
    "priority_class": "BYTES",
    "deadline_ms": "INT32",
    "cache_priority": "INT32",
    "cache_ttl_s": "FP32",
}
