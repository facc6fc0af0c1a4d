"""Chooses the number of draft tokens per sequence that maximises tokens per second, possibly none.

A step of n sequences that verifies m drafts takes longer than one without, and yields one token
more per accepted draft. Whether that is faster depends on the sequence's acceptance rate and on the
batch size: a step of a few rows is bound by reading the weights, so drafts are nearly free; at
hundreds of rows every row costs.

A runner that works ahead schedules a step's drafts before the drafter has looked for them, and may
then compute rows for nothing. It reports how many drafts a sequence had, and as a text that repeats
goes on repeating, that is the forecast: at most one more than twice as many are scheduled, and
where there were none, the rate is one of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass

import numpy as np

from inflight.core.batch import Batch, StepOutput
from inflight.core.request import AUTO_DRAFTS
from inflight.core.sequence import Sequence, SequenceGroup

# Estimate of the acceptance rate.
_MEMORY = 0.9  # decay per step
_FADING = 0.98  # decay while nothing is drafted, so that drafting is tried again
_PRIOR_WEIGHT = 2.0  # of the other sequences' rate, in drafts
_FIRST_GUESS = 0.5
_SHARED_MEMORY = 0.98
_SHARED_FADING = 0.999  # per step in which no sequence drafts, though some may

_NO_LIMIT = 1 << 30

# A runner that works ahead has launched the next step when a step's report arrives.
_STEPS_TO_REPORT = 2

# Smaller gains do not justify drafting.
_MIN_GAIN = 1.02

# Planning for many sequences costs host time and changes little from step to step.
_MANY = 32
_STEPS_BETWEEN = 8


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Step times of a runner, measured when it starts.

    Attributes:
        tokens: numbers of tokens of the verification steps timed; ascending.
        seconds: time of a step with that many tokens, with short contexts.
        draft_seconds: time of drafting one token for every sequence.
    """

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    draft_seconds: float = 0.0


class _Rate:
    """An acceptance rate, as a decaying average."""

    __slots__ = ("right", "tried", "value")

    def __init__(self, prior: float) -> None:
        self.right = 0.0
        self.tried = 0.0
        self.value = prior

    def observe(self, right: int, tried: int, prior: float) -> None:
        memory = _MEMORY if tried else _FADING
        self.right = memory * self.right + right
        self.tried = memory * self.tried + tried
        self.value = (self.right + _PRIOR_WEIGHT * prior) / (self.tried + _PRIOR_WEIGHT)


class _Acceptance:
    """A sequence's acceptance rates, and how many drafts it had.

    Attributes:
        sequence: its sequence.
        rates: where the forecast is no drafts, and otherwise.
        num_proposed: drafts that it had for the last two steps of which that was reported.
    """

    __slots__ = ("num_proposed", "rates", "sequence")

    def __init__(self, sequence: Sequence, priors: list[float]) -> None:
        self.sequence = sequence
        self.rates = [_Rate(prior) for prior in priors]
        self.num_proposed: deque[int] = deque(maxlen=_STEPS_TO_REPORT)

    def forecast(self) -> tuple[float, int]:
        """Acceptance rate of the next step, and its number of drafts at most."""
        if not self.num_proposed:
            return self.rates[True].value, _NO_LIMIT
        last = self.num_proposed[-1]
        return self.rates[last > 0].value, 1 + 2 * last

    def had_forecast(self) -> bool:
        """Whether drafts were forecast when the step that is observed now was planned."""
        known = len(self.num_proposed) == _STEPS_TO_REPORT
        return not known or self.num_proposed[0] > 0


class DraftBudget:
    """Sets `num_drafts` of sequences.

    Args:
        costs: of the runner.
        max_drafts: of a sequence in a step.
        default: number of drafts, or AUTO_DRAFTS, for requests that do not set it.
        host_drafts: whether sequences that need committed tokens (see `Sequence`) can have drafts.
    """

    def __init__(
        self, costs: StepCosts, max_drafts: int, default: int, host_drafts: bool = True
    ) -> None:
        self._costs = costs
        self._max_drafts = max_drafts
        self._default = default
        self._host_drafts = host_drafts
        self._acceptance: dict[int, _Acceptance] = {}
        self._shared_rates = [_FIRST_GUESS, _FIRST_GUESS]  # as in _Acceptance
        self._planned_for = -1
        self._steps_since = 0

    def add(self, sequence: Sequence) -> None:
        """Add a request; one with a fixed number of drafts gets it from now on."""
        wanted = sequence.request.speculation
        if wanted is None:
            wanted = self._default
        if sequence.needs_committed_tokens and not self._host_drafts:
            wanted = 0
        if wanted == AUTO_DRAFTS:
            self._acceptance[sequence.request_id] = _Acceptance(sequence, self._shared_rates)
        else:
            sequence.num_drafts = min(wanted, self._max_drafts)

    def forget(self, group: SequenceGroup) -> None:
        """Drop a finished request; idempotent."""
        self._acceptance.pop(group.request_id, None)

    def observe(self, batch: Batch, output: StepOutput) -> None:
        """Update the acceptance rates from a committed step."""
        for index, chunk in enumerate(batch.chunks):
            acceptance = self._acceptance.get(chunk.sequence.request_id)
            if acceptance is None or chunk.is_stale or index in output.errors:
                continue
            drafted = output.num_drafted.get(index, 0)
            forecast = acceptance.had_forecast()
            if index in output.num_proposed:
                acceptance.num_proposed.append(output.num_proposed[index])
                drafted = chunk.num_drafts  # rows without a draft are rejected, and cost as much
            right = len(output.token_ids[index]) - 1 if drafted else 0
            # Drafts after the first rejected one tell nothing about the rate.
            tried = min(right + 1, drafted) if drafted else 0
            shared = self._shared_rates
            acceptance.rates[forecast].observe(right, tried, shared[forecast])
            for is_right in [True] * right + [False] * (tried - right):
                memory = _SHARED_MEMORY
                shared[forecast] = memory * shared[forecast] + (1.0 - memory) * is_right

    def plan(self, running: Collection[SequenceGroup]) -> None:
        """Set each sequence's number of drafts before a step is scheduled."""
        if not self._acceptance:
            return
        self._steps_since += 1
        same = len(running) == self._planned_for
        if same and len(running) > _MANY and self._steps_since < _STEPS_BETWEEN:
            return
        self._planned_for, self._steps_since = len(running), 0
        ours = [
            self._acceptance[one.request_id]
            for one in running
            if one.request_id in self._acceptance
        ]
        forecasts = [one.forecast() for one in ours]
        rates, limits = [rate for rate, _ in forecasts], [limit for _, limit in forecasts]
        counts = self.best_counts(rates, len(running), limits)
        for one, count in zip(ours, counts, strict=True):
            one.sequence.num_drafts = count
        if not any(counts):  # drift back, so that drafting is tried again
            self._shared_rates = [
                rate + (1.0 - _SHARED_FADING) * (_FIRST_GUESS - rate) for rate in self._shared_rates
            ]

    def best_counts(
        self,
        rates: Iterable[float],
        num_running: int,
        limits: Sequence_[int] | None = None,
    ) -> list[int]:
        """Numbers of drafts for sequences with these acceptance rates.

        The j-th draft of a sequence is accepted with probability rate ** j. Drafts are added in
        descending order of that probability, as long as tokens per second rise.

        Args:
            rates: of each sequence.
            num_running: sequences in the batch, with those that cannot have drafts.
            limits: maximum drafts of each; None for none but the setting's.
        """
        worth = np.array(list(rates))[:, np.newaxis] ** np.arange(1, self._max_drafts + 1)
        if not worth.size:
            return []
        most = np.array(limits or [_NO_LIMIT] * len(worth))
        worth[np.arange(self._max_drafts) >= most[:, np.newaxis]] = 0.0
        order = np.argsort(-worth, axis=None, kind="stable")
        gained = np.concatenate([[0.0], np.cumsum(worth.ravel()[order])])
        depth = np.maximum.accumulate(order % self._max_drafts + 1)
        passes = np.concatenate([[0], depth])
        tokens = num_running + np.arange(len(gained))
        costs = self._costs
        seconds = np.interp(tokens, costs.tokens, costs.seconds)
        beyond = tokens > costs.tokens[-1]  # extrapolated in proportion, an upper bound
        seconds[beyond] = costs.seconds[-1] * tokens[beyond] / costs.tokens[-1]
        rate = (num_running + gained) / (seconds + passes * costs.draft_seconds)
        best = int(np.argmax(rate))
        if rate[best] < _MIN_GAIN * rate[0]:
            best = 0
        counts = np.zeros(len(worth), np.int64)
        np.add.at(counts, order[:best] // self._max_drafts, 1)
        return [int(count) for count in np.minimum(counts, most)]
