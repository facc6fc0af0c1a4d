"""What the host says of one row of logits before a token is chosen from it: which tokens are more
or less likely than the model thinks, and which are not allowed. The same for every device.

Penalties are not among it: they depend on nothing but counts, which a device keeps itself.
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
    """What is to be done to a row of logits, after the penalties.

    Attributes:
        token_ids: ascending, each once; there may be some that a model's vocabulary does not have.
        biases: what is added to the logits of these; BANNED for those that may not be chosen.
        allowed: tokens that alone may be chosen; () for all. The same in all rows of a sequence.
    """

    token_ids: tuple[int, ...] = ()
    biases: tuple[float, ...] = ()
    allowed: tuple[int, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.token_ids or self.allowed)


class LogitAdjustments:
    """One sequence's row_params about single tokens, and what they need to know of its tokens so
    far.

    Args:
        params: the request's.
        num_prompt_tokens: of its prompt.
        eos_token_ids: tokens that end it, which min_tokens bans and DRY takes for breakers.
        bad_word_ids: strings of tokens that must not appear in the output.
        breaker_ids: tokens across which DRY sees no repetition (see `text.dry_breakers`).

    Attributes:
        needs_committed_tokens: the host must have seen all tokens before it can say what the next
            one may be.
        is_noop: nothing is said of any row.
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
        # What most rows get, made once.
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
        """The same row_params, for a sequence that may go on otherwise from here."""
        other = copy.copy(self)
        assert self._dry is None, "beams do without DRY"
        if self._ngrams is not None:
            other._ngrams = self._ngrams.fork()
        return other

    def of_row(
        self, token_ids: list[int], tail: Sequence[int] = (), num_unknown: int = 0
    ) -> Adjustment:
        """What is said of the row of logits that follows some tokens.

        Args:
            token_ids: prompt and output, as far as they are committed.
            tail: drafted tokens after these.
            num_unknown: further tokens between the two that are in flight; only where the host need
                not know them (see `needs_committed_tokens`).
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
    """Whether what is said of a row depends on which tokens stand before it, not only on how many.

    So it is for DRY, no_repeat_ngram_size and bad words of several tokens; penalties, logit_bias,
    allowed_token_ids, min_tokens and bad words of one token do without.
    """
    return (
        params.has_dry
        or params.no_repeat_ngram_size > 0
        or any(len(word) > 1 for word in bad_word_ids)
    )
