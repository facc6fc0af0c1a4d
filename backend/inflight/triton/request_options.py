"""The request options that concern a request as a whole: its outputs, its prompt, its speed.

The annotated fields of `RequestOptions` are the second half of the table of request options (see
`sampling.options`); the first is `SamplingParams`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from inflight.config import MAX_DRAFTS
from inflight.core.output_constraint import KINDS
from inflight.core.request import DEFAULT_CACHE_PRIORITY, PINNED_CACHE_PRIORITY, PriorityClass
from inflight.sampling.options import Option, check_options, option_fields
from inflight.sampling.params import SAMPLING_OPTIONS

MAX_OUTPUTS = 64
MAX_SALT_LENGTH = 256
MAX_KEPT_TOKENS = 64
MAX_DEADLINE_MS = 24 * 60 * 60 * 1000
MAX_CACHE_TTL_S = 30 * 24 * 60 * 60


class RequestOptions(msgspec.Struct, frozen=True):
    """Request options beyond `SamplingParams`; None if not set.

    Raises:
        RequestError: a value is out of its bounds; names it.
    """

    stream: Annotated[
        bool,
        Option("Respond as tokens arrive, not once at the end.", vllm=(), client=""),
    ] = False
    exclude_input_in_output: Annotated[
        bool | None,
        Option("False prepends the prompt to the output.", vllm=(), default="true"),
    ] = None
    echo: Annotated[
        bool | None,
        Option(
            "True prepends the prompt to the output. With `num_logprobs` it also requests the "
            "prompt's log-probabilities.",
            default="false",
        ),
    ] = None
    return_num_input_tokens: Annotated[
        bool,
        Option("Accepted; the count is always part of the answer.", vllm=()),
    ] = True
    return_num_output_tokens: Annotated[
        bool,
        Option("Accepted; the count is always part of the answer.", vllm=()),
    ] = True
    return_finish_reason: Annotated[
        bool,
        Option("Accepted; the reason is always part of the answer.", vllm=()),
    ] = True
    return_cumulative_logprob: Annotated[
        bool,
        Option("Accepted; the sum is always part of the answer.", vllm=()),
    ] = True
    return_logprobs: Annotated[
        bool,
        Option("Accepted; `num_logprobs` decides what is reported.", vllm=()),
    ] = True
    sampling_parameters: Annotated[
        str | None,
        Option(
            "Options as one JSON object, under vLLM's names.",
            vllm=(),
            client="str | Mapping[str, Any]",
            default="none",
        ),
    ] = None
    cache_salt: Annotated[
        str,
        Option(
            "Cached prefixes are shared only between requests with the same salt.",
            allowed=f"up to {MAX_SALT_LENGTH} characters, all printable",
            vllm=(),
        ),
    ] = ""
    n: Annotated[
        int,
        Option(
            "Outputs per prompt, which is computed once. With a `seed`, output i has seed + i.",
            low=1,
            high=MAX_OUTPUTS,
            allowed=f"1 to {MAX_OUTPUTS}",
        ),
    ] = 1
    best_of: Annotated[
        int | None,
        Option(
            "Outputs to compute, of which the n with the highest log-probability per token are the "
            "answer. Cannot be combined with `stream`.",
            low=1,
            high=MAX_OUTPUTS,
            allowed=f"1 to {MAX_OUTPUTS}",
            default="`n`",
        ),
    ] = None
    skip_special_tokens: Annotated[
        bool,
        Option(
            "False keeps the special tokens of an output in its text, but for the one that ends it."
        ),
    ] = True
    keep_special_tokens: Annotated[
        tuple[str, ...],
        Option(
            "Special tokens of an output that stay in its text, such as `[TOOL_CALLS]`.",
            max_items=MAX_KEPT_TOKENS,
            vllm=(),
        ),
    ] = ()
    speculation: Annotated[
        str | None,
        Option(
            "Draft tokens per step. Changes the speed, never the output.",
            allowed=f"auto, off, or 0 to {MAX_DRAFTS}",
            vllm=(),
            default="the engine's `speculative_config.default`",
        ),
    ] = None
    return_log_probs: Annotated[
        bool,
        Option("True reports each output token, as `num_logprobs` 0 does.", vllm=()),
    ] = False
    return_timing: Annotated[
        bool,
        Option(
            "True reports where the time of each output went: `timing` in `draft_stats`.", vllm=()
        ),
    ] = False
    guided_decoding_guide_type: Annotated[
        str | None,
        Option(
            "What the output must match: any JSON, or a JSON schema, a regular expression, a "
            "grammar (GBNF or Lark) or one of several strings (a JSON list).",
            allowed=", ".join(KINDS),
            vllm=(),
            default="any text",
        ),
    ] = None
    guided_decoding_guide: Annotated[
        str | None,
        Option(
            "The schema, expression, grammar or choices.",
            vllm=(),
            client="str | Mapping[str, Any] | Sequence[str]",
            default="none",
        ),
    ] = None
    priority_class: Annotated[
        str,
        Option(
            "How urgent the request is: while requests of both classes are queued, each has its "
            "share of the tokens (`interactive_weight` and `batch_weight` of the engine).",
            allowed=", ".join(PriorityClass),
            vllm=(),
        ),
    ] = PriorityClass.INTERACTIVE.value
    deadline_ms: Annotated[
        int | None,
        Option(
            "Milliseconds from the request's arrival after which nothing is computed for it: it "
            "ends with an error, wherever it is by then.",
            low=1,
            high=MAX_DEADLINE_MS,
            allowed=f"1 to {MAX_DEADLINE_MS}",
            vllm=(),
            default="none",
        ),
    ] = None
    cache_priority: Annotated[
        int,
        Option(
            "How long the KV blocks of prompt and output stay in the prefix cache: those of lower "
            f"priority are evicted first. {PINNED_CACHE_PRIORITY} pins them, in up to half of the "
            "cache. The latest request with a prefix sets its priority, unless it is pinned.",
            low=0,
            high=PINNED_CACHE_PRIORITY,
            allowed=f"0 to {PINNED_CACHE_PRIORITY}",
            vllm=(),
        ),
    ] = DEFAULT_CACHE_PRIORITY
    cache_ttl_s: Annotated[
        float | None,
        Option(
            "Seconds from the end of the request after which `cache_priority` falls back to its "
            "default; each later request with the same prefix and option extends it.",
            low=0.0,
            high=MAX_CACHE_TTL_S,
            open_low=True,
            allowed=f"more than 0, up to {MAX_CACHE_TTL_S}",
            vllm=(),
            default="none",
        ),
    ] = None

    def __post_init__(self) -> None:
        check_options(self, REQUEST_OPTIONS)


REQUEST_OPTIONS = option_fields(RequestOptions)

OPTIONS = (*SAMPLING_OPTIONS, *REQUEST_OPTIONS)
"""The table: every option of a request, in the order of the tensors."""
