"""What a client asked for, and what comes back: frozen data, the same on both sides of the wire."""

from __future__ import annotations

import enum

import msgspec

from inflight.core.output_constraint import StructuredOutput
from inflight.errors import InflightError, RequestError
from inflight.sampling.params import SamplingParams

AUTO_DRAFTS = -1
"""Drafts as far as they pay (see `speculation`)."""


class FinishReason(enum.StrEnum):
    """Why a request ended without an error."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


def check_length(num_tokens: int, max_tokens: int | None, max_model_len: int, param: str) -> None:
    """Hold a prompt against a model's context, which has to have room for a token of output too,
    unless none is wanted.

    Raises:
        RequestError: it is too long; names `param`.
    """
    allowed = max_model_len if max_tokens == 0 else max_model_len - 1
    if num_tokens > allowed:
        # Gateways look for this wording to fall back to a model with a longer context.
        raise RequestError(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt "
            f"has {num_tokens}; allowed: {allowed}"
            + (" and one to generate" if allowed < max_model_len else ""),
            param,
        )


class Request(msgspec.Struct, frozen=True):
    """One prompt to continue.

    Attributes:
        request_id: unique within an engine; ours, never the client's.
        prompt_ids: token ids, at least one.
        params: how to choose tokens and when to stop.
        cache_salt: requests share cached prefixes only with requests of the same salt.
        acknowledged: a detokenizer reports what it delivered; when it falls silent, the consumer
            is gone and the request is set aside (see `delivery`).
        speculation: tokens to draft in each step, AUTO_DRAFTS for as many as pay, 0 for none; None
            for the engine's default. Changes how fast an output comes, never what it is.
        structured: what the output must match; None for any text.
        sibling: id of another request with the same prompt, sent before this one: this one begins
            when the prompt stands in the prefix cache.
        output_ids: of a beam search, the ids under which its outputs are told, the best one first:
            request_id, and those of as many others as are wanted, beam_width in all at most. ()
            for the best one alone.
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


class Candidate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A token that might stand at a place in the text, and what the model thinks of it.

    Attributes:
        token_id: the token.
        logprob: log-probability under the model's own distribution, before penalties, biases and
            temperature.
        rank: 1 for the likeliest; of equally likely ones the smaller id comes first.
        text: its text by itself, with U+FFFD for what is no whole character.
    """

    token_id: int
    logprob: float
    rank: int
    text: str = ""

    @staticmethod
    def ranked(
        token_id: int, logprob: float, rank: int, ids: list[int], logprobs: list[float]
    ) -> list[Candidate]:
        """What is reported of one token: itself, then the likeliest ones but for itself.

        Args:
            token_id, logprob, rank: of the token that stands there.
            ids, logprobs: of the likeliest ones, in order.
        """
        others = [
            Candidate(id_, value, place)
            for place, (id_, value) in enumerate(zip(ids, logprobs, strict=True), 1)
            if id_ != token_id
        ]
        return [Candidate(token_id, logprob, rank), *others]


class TokenEvent(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What one step did for one request. The last one has `finish_reason` or `error`.

    Attributes:
        request_id: whose.
        token_ids: ids released by this event, in order; may be empty at the end.
        window: the ids before `token_ids` that detokenizing them needs (see `text.detokenize`).
        position: output tokens released up to and including this event.
        trim: characters to cut from the end of the text, where a stop string began.
        finish_reason: set on the last event of a request that ended well.
        cumulative_logprob: sum of the chosen tokens' log-probabilities so far.
        num_cached_tokens: prompt tokens that came from the prefix cache.
        candidates: of each of `token_ids` what num_logprobs asks for: the token itself, then the
            likeliest ones; [] where nothing was asked for.
        prompt_candidates: of the prompt's next tokens what num_prompt_logprobs asks for, in the
            same form; [] for the first token, which follows nothing. They come as the prompt is
            computed, the last ones with the first event that has tokens.
        num_drafted, num_accepted, num_steps: at the end, drafts that were checked, those of them
            that were right, and steps that chose tokens; num_drafted is None without drafts.
        error_kind, error: set on the last event of a request that failed (see `errors`).
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

    @property
    def is_last(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @classmethod
    def failed(cls, request_id: int, error: InflightError) -> TokenEvent:
        return cls(request_id, error_kind=error.kind, error=str(error))
