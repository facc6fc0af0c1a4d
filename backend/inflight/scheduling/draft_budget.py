"""Chooses the number of draft tokens per sequence that maximises tokens per second, possibly none.

A step of n sequences that verifies m drafts takes longer than one without, and yields one token
more per accepted draft. Whether that is faster depends on the sequence's acceptance rate and on the
batch size: a step of a few rows is bound by reading the weights, so drafts are nearly free; at
hundreds of rows every row costs. `acceptance` estimates the rates, `StepCosts` has the times.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from inflight.core.batch import Batch, StepOutput
from inflight.core.request import AUTO_DRAFTS
from inflight.core.sequence import Sequence, SequenceGroup
from inflight.scheduling.acceptance import NO_LIMIT, Acceptance, Rates, SharedRates

# Smaller gains do not justify drafting.
_MIN_GAIN = 1.02

# Planning for many sequences costs host time and changes little from step to step.
_MANY = 32
_STEPS_BETWEEN = 8


class StepTimes(NamedTuple):
    """Times of steps by their size.

    Attributes:
        tokens: numbers of tokens of the steps timed; ascending.
        seconds: time of each of these steps.
    """

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    def of(self, num_tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Times of steps of these sizes: beyond the largest one timed in proportion, which is an
        upper bound."""
        found = np.interp(num_tokens, self.tokens, self.seconds)
        beyond = num_tokens > self.tokens[-1]
        found[beyond] = self.seconds[-1] * num_tokens[beyond] / self.tokens[-1]
        return found


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Step times of a runner, measured when it starts, with short contexts.

    Attributes:
        verifying: of steps with drafts.
        draft_seconds: time of drafting one more token for every sequence.
        verifying_one: of steps with drafts of one sequence alone; None if they take no less.
        plain: of steps without drafts; None if they take as long as others of their size. With
            more sequences than timed they do.
        trimmed_one: of `verifying_one`, where the sequence turns out to have no drafts; None if
            they take as long.
    """

    verifying: StepTimes
    draft_seconds: float = 0.0
    verifying_one: StepTimes | None = None
    plain: StepTimes | None = None
    trimmed_one: StepTimes | None = None

    def seconds(self, num_running: int, num_drafts: int) -> npt.NDArray[np.float64]:
        """Times of the steps of so many sequences with 0 to num_drafts drafts in total."""
        times = self.verifying
        if num_running == 1 and self.verifying_one is not None:
            times = self.verifying_one
        found = times.of(num_running + np.arange(1 + num_drafts))
        if self.plain is not None and num_running <= self.plain.tokens[-1]:
            found[:1] = self.plain.of(np.array([num_running]))
        return found

    def seconds_trimmed(self, num_drafts: int) -> npt.NDArray[np.float64]:
        """Times of the steps of one sequence with 0 to num_drafts drafts scheduled, and none."""
        found = self.seconds(1, num_drafts)
        if self.trimmed_one is not None:
            found[1:] = self.trimmed_one.of(1 + np.arange(1, 1 + num_drafts))
        return found


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
        self._acceptance: dict[int, Acceptance] = {}
        # Of steps of so many running sequences, with drafts of each: those of the last plan.
        self._seconds_for, self._seconds = 0, np.zeros(0)
        self._seconds_of_one: list[float] = costs.seconds(1, max_drafts).tolist()
        self._trimmed_of_one: list[float] = costs.seconds_trimmed(max_drafts).tolist()
        self._shared_rates = SharedRates()
        self._planned_for = -1
        self._steps_since = 0

    def add(self, sequence: Sequence) -> None:
        """Add a request; one with a fixed number of drafts gets it from now on."""
        wanted = sequence.request.speculation
        if wanted is None:
            wanted = self._default
        if sequence.needs_committed_tokens and not self._host_drafts:
            wanted = 0
        sequence.adapts_drafts = wanted == AUTO_DRAFTS
        if sequence.adapts_drafts:
            self._acceptance[sequence.request_id] = Acceptance(sequence, self._shared_rates)
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
            num_proposed = output.num_proposed.get(index)
            if num_proposed is not None:
                acceptance.report(forecast, num_proposed, chunk.num_drafts)
                # Rows without a draft are rejected. Of a sequence without any, the report says what
                # would have become of the first.
                drafted = max(1, chunk.num_drafts)
            if chunk.num_drafts or num_proposed is None:
                right = len(output.token_ids[index]) - 1 if drafted else 0
            else:
                right = int(index in output.would_accept)
            acceptance.observe(forecast, right, drafted)

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
        counts = self.best_counts(
            [one.rates() for one in ours], len(running), [one.most for one in ours]
        )
        for one, count in zip(ours, counts, strict=True):
            one.sequence.num_drafts = count
        if not any(counts):
            self._shared_rates.fade()

    def best_counts(
        self,
        rates: Iterable[Rates],
        num_running: int,
        limits: Sequence_[int] | None = None,
    ) -> list[int]:
        """Numbers of drafts for sequences with these acceptance rates.

        The j-th draft of a sequence is accepted with probability first * later ** (j - 1). Drafts
        are added in descending order of that probability, as long as tokens per second rise.

        Args:
            rates: of each sequence.
            num_running: sequences in the batch, with those that cannot have drafts.
            limits: maximum drafts of each; None for none but the setting's.
        """
        all_rates = [*rates]
        if not all_rates:
            return []
        if num_running == 1:
            return [self._best_count(all_rates[0], limits[0] if limits else NO_LIMIT)]
        pairs = np.array(all_rates)[:, :2]
        worth = pairs[:, :1] * pairs[:, 1:] ** np.arange(self._max_drafts)
        most = np.array(limits or [NO_LIMIT] * len(worth))
        worth[np.arange(self._max_drafts) >= most[:, np.newaxis]] = 0.0
        order = np.argsort(-worth, axis=None, kind="stable")
        gained = np.concatenate([[0.0], np.cumsum(worth.ravel()[order])])
        depth = np.maximum.accumulate(order % self._max_drafts + 1)
        passes = np.concatenate([[0], depth])
        seconds = self._step_seconds(num_running, len(order))
        rate = (num_running + gained) / (seconds + passes * self._costs.draft_seconds)
        best = int(np.argmax(rate))
        if rate[best] < _MIN_GAIN * rate[0]:
            best = 0
        counts = np.zeros(len(worth), np.int64)
        np.add.at(counts, order[:best] // self._max_drafts, 1)
        return [int(count) for count in np.minimum(counts, most)]

    def _best_count(self, rates: Rates, limit: int) -> int:
        """The same for a sequence alone, in a twentieth of the time."""
        seconds, trimmed = self._seconds_of_one, self._trimmed_of_one
        draft_seconds, any_draft = self._costs.draft_seconds, rates.any_draft
        best, best_rate = 0, _MIN_GAIN / seconds[0]
        tokens, worth = 1.0, rates.first
        for count in range(1, min(self._max_drafts, limit) + 1):
            tokens += worth
            worth *= rates.later
            saved = (1.0 - any_draft) * (seconds[count] - trimmed[count])
            rate = tokens / (seconds[count] - saved + count * draft_seconds)
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def _step_seconds(self, num_running: int, num_drafts: int) -> npt.NDArray[np.float64]:
        """See `StepCosts.seconds`; computed when the number of sequences changes."""
        if num_running != self._seconds_for:
            self._seconds_for = num_running
            self._seconds = self._costs.seconds(num_running, num_running * self._max_drafts)
        return self._seconds[: 1 + num_drafts]
