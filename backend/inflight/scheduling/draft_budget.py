"""How many tokens to draft for each sequence: as many as pay, and none where they would not.

A step of n sequences that checks m drafts takes longer than one without, and yields as many tokens
more as drafts are right. Whether that is faster depends on how often this sequence's drafts have
been right and on how full the batch is: at a few rows a step costs what its weights cost to read,
and drafts are nearly free; at hundreds each row costs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

from inflight.core.batch import Batch, StepOutput
from inflight.core.request import AUTO_DRAFTS
from inflight.core.sequence import Sequence, SequenceGroup

# Of the estimate of how often a draft is right.
_MEMORY = 0.9  # weight of what was seen a step ago
_FADING = 0.98  # the same while nothing is drafted: so that it is tried again
_PRIOR_WEIGHT = 2.0  # of the other sequences, in drafts
_FIRST_GUESS = 0.5
_SHARED_MEMORY = 0.98
_SHARED_FADING = 0.999  # a step in which nobody drafts, though some might

# Less gain than this is not worth a change of what works.
_MIN_GAIN = 1.02

# Plans of many sequences take host time, and change little from step to step.
_MANY = 32
_STEPS_BETWEEN = 8


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What a runner's steps take, measured when it starts.

    Attributes:
        tokens: of a step in which each sequence computes a few; ascending.
        seconds: that such a step takes, without long contexts.
        draft_seconds: that drafting one token for each sequence takes.
    """

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    draft_seconds: float = 0.0


class _Acceptance:
    """How often a sequence's drafts are right, from the latest ones above all."""

    __slots__ = ("rate", "right", "sequence", "tried")

    def __init__(self, sequence: Sequence, prior: float) -> None:
        self.sequence = sequence
        self.right = 0.0
        self.tried = 0.0
        self.rate = prior

    def observe(self, right: int, tried: int, prior: float) -> None:
        memory = _MEMORY if tried else _FADING
        self.right = memory * self.right + right
        self.tried = memory * self.tried + tried
        self.rate = (self.right + _PRIOR_WEIGHT * prior) / (self.tried + _PRIOR_WEIGHT)


class DraftBudget:
    """Sets `num_drafts` of sequences.

    Args:
        costs: of the runner.
        max_drafts: of a sequence in a step.
        default: of requests that do not say: so many drafts, or AUTO_DRAFTS.
        host_drafts: whether sequences that need the host (see `Sequence`) can have drafts.
    """

    def __init__(
        self, costs: StepCosts, max_drafts: int, default: int, host_drafts: bool = True
    ) -> None:
        self._costs = costs
        self._max_drafts = max_drafts
        self._default = default
        self._host_drafts = host_drafts
        self._acceptance: dict[int, _Acceptance] = {}
        self._shared_rate = _FIRST_GUESS
        self._planned_for = -1
        self._steps_since = 0

    def add(self, sequence: Sequence) -> None:
        """A request came in: those that say how many drafts they want get them from now on."""
        wanted = sequence.request.speculation
        if wanted is None:
            wanted = self._default
        if sequence.needs_committed_tokens and not self._host_drafts:
            wanted = 0
        if wanted == AUTO_DRAFTS:
            self._acceptance[sequence.request_id] = _Acceptance(sequence, self._shared_rate)
        else:
            sequence.num_drafts = min(wanted, self._max_drafts)

    def forget(self, group: SequenceGroup) -> None:
        """A request has ended; idempotent."""
        self._acceptance.pop(group.request_id, None)

    def observe(self, batch: Batch, output: StepOutput) -> None:
        """A step was committed: learn from it how good drafts are."""
        for index, chunk in enumerate(batch.chunks):
            acceptance = self._acceptance.get(chunk.sequence.request_id)
            if acceptance is None or chunk.is_stale or index in output.errors:
                continue
            drafted = output.num_drafted.get(index, 0)
            right = len(output.token_ids[index]) - 1 if drafted else 0
            # After the first that is wrong, nobody knows about the others.
            tried = min(right + 1, drafted) if drafted else 0
            acceptance.observe(right, tried, self._shared_rate)
            for is_right in [True] * right + [False] * (tried - right):
                memory = _SHARED_MEMORY
                self._shared_rate = memory * self._shared_rate + (1.0 - memory) * is_right

    def plan(self, running: Collection[SequenceGroup]) -> None:
        """Before a step is scheduled: choose the drafts that raise tokens per second most."""
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
        counts = self.best_counts([one.rate for one in ours], len(running))
        for one, count in zip(ours, counts, strict=True):
            one.sequence.num_drafts = count
        if not any(counts):  # so that what was once found does not hold for ever
            self._shared_rate += (1.0 - _SHARED_FADING) * (_FIRST_GUESS - self._shared_rate)

    def best_counts(self, rates: Iterable[float], num_running: int) -> list[int]:
        """Drafts for sequences whose drafts are right at these rates.

        The j-th draft of a sequence counts if it and all before it are right: rate ** j. Drafts are
        taken in the order of what they are worth, as long as tokens per second rise.
        """
        worth = np.array(list(rates))[:, np.newaxis] ** np.arange(1, self._max_drafts + 1)
        if not worth.size:
            return []
        order = np.argsort(-worth, axis=None, kind="stable")
        gained = np.concatenate([[0.0], np.cumsum(worth.ravel()[order])])
        depth = np.maximum.accumulate(order % self._max_drafts + 1)
        passes = np.concatenate([[0], depth])
        tokens = num_running + np.arange(len(gained))
        costs = self._costs
        seconds = np.interp(tokens, costs.tokens, costs.seconds)
        beyond = (
            tokens > costs.tokens[-1]
        )  # in proportion, which is too much rather than too little
        seconds[beyond] = costs.seconds[-1] * tokens[beyond] / costs.tokens[-1]
        rate = (num_running + gained) / (seconds + passes * costs.draft_seconds)
        best = int(np.argmax(rate))
        if rate[best] < _MIN_GAIN * rate[0]:
            best = 0
        counts = np.zeros(len(worth), np.int64)
        np.add.at(counts, order[:best] // self._max_drafts, 1)
        return [int(count) for count in counts]
