"""Adjustments of a row of logits that the host computes before sampling: additive biases and bans.
The same for every device.

Penalties are not included: they depend only on token counts, which a device keeps itself.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from inflight.sampling.params import SamplingParams
from inflight.sampling.repetition import DryPenalty, RepeatedNgrams

BANNED = -math.inf


@dataclass(frozen=True, slots=True)
class Adjustment:
    """The adjustments of one row of logits, applied after the penalties.

    Attributes:
        token_ids: ascending, unique; may include ids outside a model's vocabulary.
        biases: added to the logits of these; BANNED for banned tokens.
        allowed: if not (), only these tokens are allowed. The same in all rows of a sequence.
    """

    token_ids: tuple[int, ...] = ()
    biases: tuple[float, ...] = ()
    allowed: tuple[int, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.token_ids or self.allowed)


class LogitAdjustments:
    """One sequence's logit adjustments, with the state that they need of its tokens.

    Args:
        params: the request's.
        num_prompt_tokens: of its prompt.
        eos_token_ids: tokens that end it; banned before min_tokens, and breakers for DRY.
        bad_word_ids: token sequences that must not appear in the output.
        breaker_ids: tokens across which DRY matches no repetition (see `text.dry_breakers`).

    Attributes:
        needs_committed_tokens: an adjustment depends on the previous tokens themselves.
        is_noop: no row is adjusted.
    """

    __slots__ = (
        "_after_min_tokens",
        "_allowed",
        "_before_min_tokens",
        "_dry",
        "_ends",
        "_fixed",
        "_min_tokens",
        "_ngrams",
        "_num_prompt_tokens",
        "_phrases",
        "is_noop",
        "needs_committed_tokens",
    )

    def __init__(
        self,
        params: SamplingParams,
        num_prompt_tokens: int,
        eos_token_ids: Collection[int] = (),
        bad_word_ids: Sequence[tuple[int, ...]] = (),
        breaker_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._min_tokens = params.min_tokens
        self._ends = tuple(eos_token_ids)
        self._allowed = tuple(sorted(set(params.allowed_token_ids)))
        self._phrases = tuple(word for word in bad_word_ids if len(word) > 1)
        self._fixed = dict(params.logit_bias)
        self._fixed.update((word[0], BANNED) for word in bad_word_ids if len(word) == 1)
        # The common cases, computed once.
        self._after_min_tokens = self._adjustment(self._fixed)
        self._before_min_tokens = self._adjustment(
            {**self._fixed, **dict.fromkeys(self._ends, BANNED)}
        )
        self._ngrams: RepeatedNgrams | None = None
        if params.no_repeat_ngram_size:
            self._ngrams = RepeatedNgrams(params.no_repeat_ngram_size)
        self._dry: DryPenalty | None = None
        if params.has_dry:
            self._dry = DryPenalty(
                params.dry_multiplier,
                params.dry_base,
                params.dry_allowed_length,
                params.dry_penalty_last_n,
                breaker_ids.union(eos_token_ids),
            )
        self.needs_committed_tokens = needs_committed_tokens(params, bad_word_ids)
        bans_ends = self._min_tokens > 0 and not self._before_min_tokens.is_empty
        self.is_noop = (
            self._after_min_tokens.is_empty and not bans_ends and not self.needs_committed_tokens
        )

    def fork(self) -> LogitAdjustments:
        """A copy for a sequence that may diverge."""
        other = copy.copy(self)
        assert self._dry is None, "beams do without DRY"
        if self._ngrams is not None:
            other._ngrams = self._ngrams.fork()
        return other

    def of_row(
        self, token_ids: list[int], tail: Sequence[int] = (), num_unknown: int = 0
    ) -> Adjustment:
        """The adjustment of the row of logits after these tokens.

        Args:
            token_ids: prompt and committed output.
            tail: draft tokens after these.
            num_unknown: tokens in flight between the two; only if not `needs_committed_tokens`.
        """
        num_output = len(token_ids) + num_unknown + len(tail) - self._num_prompt_tokens
        before_min_tokens = num_output < self._min_tokens
        if not self.needs_committed_tokens:
            return self._before_min_tokens if before_min_tokens else self._after_min_tokens
        biases = dict(self._fixed)
        if self._dry is not None:
            for token_id, penalty in self._dry.penalties(token_ids, tail).items():
                biases[token_id] = biases.get(token_id, 0.0) - penalty
        banned: set[int] = set()
        if self._ngrams is not None:
            banned |= self._ngrams.banned(token_ids, tail)
        if self._phrases:
            banned.update(self._completions(token_ids, tail))
        if before_min_tokens:
            banned.update(self._ends)
        biases.update(dict.fromkeys(banned, BANNED))
        return self._adjustment(biases)

    def _completions(self, token_ids: list[int], tail: Sequence[int]) -> list[int]:
        """Last tokens of the bad words whose other tokens the output ends with."""
        longest = max(map(len, self._phrases)) - 1
        first = max(self._num_prompt_tokens, len(token_ids) - longest)
        recent = (*token_ids[first:], *tail)
        return [word[-1] for word in self._phrases if recent[1 - len(word) :] == word[:-1]]

    def _adjustment(self, biases: dict[int, float]) -> Adjustment:
        ids = tuple(sorted(biases))
        return Adjustment(ids, tuple(biases[token_id] for token_id in ids), self._allowed)


def needs_committed_tokens(
    params: SamplingParams, bad_word_ids: Sequence[tuple[int, ...]] = ()
) -> bool:
    """Whether adjustments depend on the previous tokens themselves, not only on their number.

    True for DRY, no_repeat_ngram_size and bad words of several tokens; not for penalties,
    logit_bias, allowed_token_ids, min_tokens and bad words of one token.
    """
    return (
        params.has_dry
        or params.no_repeat_ngram_size > 0
        or any(len(word) > 1 for word in bad_word_ids)
    )
