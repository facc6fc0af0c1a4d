"""Requests and token events: frozen data, the same on both sides of the IPC."""

from __future__ import annotations

import enum

import msgspec

from inflight.core.output_constraint import StructuredOutput
from inflight.errors import InflightError, RequestError
from inflight.sampling.params import SamplingParams

AUTO_DRAFTS = -1
"""The number of drafts adapts to their acceptance rate (see `scheduling.draft_budget`)."""

DEFAULT_CACHE_PRIORITY = 35  # as in TensorRT-LLM
PINNED_CACHE_PRIORITY = 100
"""The highest; the share of blocks that have it is limited."""


class FinishReason(enum.StrEnum):
    """Why a request ended without an error."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


class PriorityClass(enum.StrEnum):
    """How urgent a request is: each class has a share of the engine's tokens while both wait."""

    INTERACTIVE = "interactive"
    BATCH = "batch"

    __hash__ = str.__hash__  # that of enums is Python code, and the scheduler's time counts


def check_length(num_tokens: int, max_tokens: int | None, max_model_len: int, param: str) -> None:
    """Check that a prompt fits the model's context, with room for one output token unless
    max_tokens is 0.

    Raises:
        RequestError: the prompt is too long; names `param`.
    """
    allowed = max_model_len if max_tokens == 0 else max_model_len - 1
    if num_tokens > allowed:
        # Gateways match this wording to fall back to a model with a longer context.
        raise RequestError(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt "
            f"has {num_tokens}; allowed: {allowed}"
            + (" and one to generate" if allowed < max_model_len else ""),
            param,
        )


class Request(msgspec.Struct, frozen=True):
    """One prompt to continue.

    Attributes:
        request_id: unique within an engine; internal, never the client's.
        prompt_ids: token ids, at least one.
        params: sampling and stop conditions.
        cache_salt: requests share cached prefixes only with requests of the same salt.
        acknowledged: a detokenizer acknowledges deliveries; a request whose acknowledgements stop
            is suspended (see `delivery`).
        speculation: tokens to draft in each step, AUTO_DRAFTS to adapt the number, 0 for none; None
            for the engine's default. Changes the speed of an output, never its tokens.
        structured: the constraint on the output; None for any text.
        sibling: id of another request with the same prompt, sent before this one: this one starts
            once the prompt is in the prefix cache.
        output_ids: for a beam search, the ids under which its outputs are returned, the best first:
            request_id, then one for each further output, at most beam_width in all. () for the best
            one only.
        return_timing: whether its last event reports where its time went.
        tenant: waiting requests of different tenants get equal shares of the tokens of their class.
        priority_class: its class.
        deadline_ms: milliseconds from its arrival after which nothing is computed for it; None for
            no deadline.
        cache_priority: of its KV blocks in the prefix cache, its output's included: those of lower
            priority are evicted first.
        cache_ttl_s: seconds from its end after which they have the default priority; None for no
            limit.
    """

    request_id: int
    prompt_ids: list[int]
    params: SamplingParams
    cache_salt: str = ""
    acknowledged: bool = False
    speculation: int | None = None
    structured: StructuredOutput | None = None
    sibling: int | None = None
    output_ids: tuple[int, ...] = ()
    return_timing: bool = False
    tenant: str = ""
    priority_class: PriorityClass = PriorityClass.INTERACTIVE
    deadline_ms: int | None = None
    cache_priority: int = DEFAULT_CACHE_PRIORITY
    cache_ttl_s: float | None = None


class Candidate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A candidate token at one position of the text: its logprob and its rank.

    Attributes:
        token_id: the token.
        logprob: under the model's own distribution, before penalties, biases and temperature.
        rank: 1 for the most probable; ties are broken by the smaller id.
        text: its text by itself, with U+FFFD for incomplete characters.
    """

    token_id: int
    logprob: float
    rank: int
    text: str = ""

    @staticmethod
    def ranked(
        token_id: int, logprob: float, rank: int, ids: list[int], logprobs: list[float]
    ) -> list[Candidate]:
        """The reported candidates of one token: itself, then the other most probable ones.

        Args:
            token_id, logprob, rank: of the token itself.
            ids, logprobs: of the most probable tokens, in order.
        """
        others = [
            Candidate(id_, value, place)
            for place, (id_, value) in enumerate(zip(ids, logprobs, strict=True), 1)
            if id_ != token_id
        ]
        return [Candidate(token_id, logprob, rank), *others]


class RequestTiming(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of a request went, in seconds, as its engine saw it.

    queue_s, prefill_s, decode_s, preempted_s and suspended_s add up to the time from its arrival to
    its end.

    Attributes:
        queue_s: before its first step.
        kv_wait_s: of queue_s, while the head of the queue waited for KV blocks.
        prefill_s, decode_s: from its first step to its first token, and from there on.
        preempted_s: from each preemption to the next token: in the queue, and to compute again.
        suspended_s: the same for suspensions, as its consumer did not read.
        ttft_s: from its arrival to its first token; None without one.
        mean_itl_s: mean time per token after the first; None without two.
        prefill_interference_s: by how much its decode steps with prompts of other requests exceeded
            its mean decode step without; None if all of them had prompts.
        num_prefill_steps, num_decode_steps: steps that computed it.
        num_preemptions: how often it lost its KV blocks.
        num_cached_tokens: prompt tokens found in the prefix cache.
        num_drafted, num_accepted: draft tokens.
        energy_j: of the GPU in its steps, in joules, by its share of their tokens; None if the
            power is not known.
    """

    queue_s: float
    kv_wait_s: float
    prefill_s: float
    decode_s: float
    preempted_s: float
    suspended_s: float
    ttft_s: float | None
    mean_itl_s: float | None
    prefill_interference_s: float | None
    num_prefill_steps: int
    num_decode_steps: int
    num_preemptions: int
    num_cached_tokens: int
    num_drafted: int
    num_accepted: int
    energy_j: float | None


class TokenEvent(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The result of one step for one request. The last one has `finish_reason` or `error`.

    Attributes:
        request_id: of the request.
        token_ids: ids released by this event, in order; may be empty at the end.
        window: the ids before `token_ids` that detokenizing them needs (see `text.detokenize`).
        position: output tokens released up to and including this event.
        trim: characters to remove from the end of the text: a stop string and the text after it.
        finish_reason: set on the last event of a request that succeeded.
        cumulative_logprob: sum of the output tokens' logprobs so far.
        num_cached_tokens: prompt tokens found in the prefix cache.
        candidates: for each of `token_ids`, the token itself, then its num_logprobs top logprobs;
            [] if none were requested.
        prompt_candidates: the same for the prompt's next tokens and num_prompt_logprobs; [] for the
            first token, which has no logprob. They come as the prompt is computed, the last ones
            with the first event that has tokens.
        num_drafted, num_accepted, num_steps: at the end, verified drafts, accepted drafts, and
            steps that sampled tokens; num_drafted is None without drafts.
        error_kind, error: set on the last event of a request that failed (see `errors`).
        timing: at the end, with `return_timing`.
        stop_word: that ended the output; empty if none did.
    """

    request_id: int
    token_ids: list[int] = []
    window: list[int] = []
    position: int = 0
    trim: int = 0
    finish_reason: FinishReason | None = None
    cumulative_logprob: float = 0.0
    num_cached_tokens: int = 0
    candidates: list[list[Candidate]] = []
    prompt_candidates: list[list[Candidate]] = []
    num_drafted: int | None = None
    num_accepted: int = 0
    num_steps: int = 0
    error_kind: str | None = None
    error: str | None = None
    timing: RequestTiming | None = None
    stop_word: str = ""

    @property
    def is_last(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @classmethod
    def failed(cls, request_id: int, error: InflightError) -> TokenEvent:
        return cls(request_id, error_kind=error.kind, error=str(error))
