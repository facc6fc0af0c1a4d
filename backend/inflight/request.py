"""What a client asked for, and what comes back: frozen data, the same on both sides of the wire."""

from __future__ import annotations

import enum

import msgspec

from inflight.errors import InflightError
from inflight.sampling import SamplingParams


class FinishReason(enum.StrEnum):
    """Why a request ended without an error."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


class Request(msgspec.Struct, frozen=True):
    """One prompt to continue.

    Attributes:
        request_id: unique within an engine; ours, never the client's.
        prompt_ids: token ids, at least one.
        params: how to choose tokens and when to stop.
        cache_salt: requests share cached prefixes only with requests of the same salt.
        acknowledged: a detokenizer reports what it delivered; when it falls silent, the consumer
            is gone and the request is set aside (see `delivery`).
    """

    request_id: int
    prompt_ids: list[int]
    params: SamplingParams
    cache_salt: str = ""
    acknowledged: bool = False


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
    error_kind: str | None = None
    error: str | None = None

    @property
    def is_last(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @classmethod
    def failed(cls, request_id: int, error: InflightError) -> TokenEvent:
        return cls(request_id, error_kind=error.kind, error=str(error))
