"""How often drafts are accepted, and how many a sequence will have.

A draft is accepted only after all those before it, and a text that repeats goes on repeating: the
first draft of a step has an acceptance rate of its own, and the later ones another.

A runner that works ahead schedules a step's drafts before the drafter has looked for them, and may
then compute rows for nothing. It reports how many drafts a sequence had, and that is the forecast:
where there were none, the first draft has one more rate; where there were fewer than scheduled, at
most one more than twice as many are scheduled next. How often there are any has a rate, too: a
step without them may cost less.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from inflight.core.sequence import Sequence

# Of the estimates.
_MEMORY = 0.9  # decay per step
_FADING = 0.98  # decay while nothing is drafted, so that drafting is tried again
_PRIOR_WEIGHT = 2.0  # of the other sequences' rate, in drafts
_FIRST_GUESS = 0.5
_FIRST_GUESS_OF_ANY = 1.0  # drafters that do not report always have drafts
_SHARED_MEMORY = 0.98
_SHARED_FADING = 0.999  # per step in which no sequence drafts, though some may

NO_LIMIT = 1 << 30
"""Drafts of a sequence whose forecast sets no limit."""

# A runner that works ahead has launched the next step when a step's report arrives.
_STEPS_TO_REPORT = 2


class Rates(NamedTuple):
    """Estimates of a sequence's acceptance rates.

    Attributes:
        first: of the first draft of a step.
        later: of a draft after accepted ones.
        any_draft: how often a step that is to verify drafts has any.
    """

    first: float
    later: float
    any_draft: float = 1.0


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


class _SharedRate:
    """An acceptance rate over all sequences."""

    __slots__ = ("_guess", "value")

    def __init__(self, guess: float = _FIRST_GUESS) -> None:
        self._guess = self.value = guess

    def observe(self, right: int, tried: int) -> None:
        """Drafts of a sequence in a step, of which at most the last one was rejected."""
        for is_right in [True] * right + [False] * (tried - right):
            self.value = _SHARED_MEMORY * self.value + (1.0 - _SHARED_MEMORY) * is_right

    def fade(self) -> None:
        self.value += (1.0 - _SHARED_FADING) * (self._guess - self.value)


class SharedRates:
    """The acceptance rates over all sequences, which new ones begin with.

    Attributes:
        first: of the first draft of a step, where no drafts were forecast, and where some were.
        later: of a draft after accepted ones.
        any_draft: how often there are any drafts, as `first`.
    """

    __slots__ = ("any_draft", "first", "later")

    def __init__(self) -> None:
        self.first = [_SharedRate(), _SharedRate()]
        self.later = _SharedRate()
        self.any_draft = [_SharedRate(_FIRST_GUESS_OF_ANY), _SharedRate(_FIRST_GUESS_OF_ANY)]

    def fade(self) -> None:
        """Drift back after a step in which no sequence drafts, so that drafting is tried again."""
        for rate in (*self.first, self.later, *self.any_draft):
            rate.fade()


class Acceptance:
    """A sequence's acceptance rates, and how many drafts it had.

    Attributes:
        sequence: its sequence.
        first, later, any_draft: as `SharedRates`.
        num_proposed: drafts that it had for the last two steps of which that was reported.
        most: drafts of the next step at most.
    """

    __slots__ = ("_shared", "any_draft", "first", "later", "most", "num_proposed", "sequence")

    def __init__(self, sequence: Sequence, shared: SharedRates) -> None:
        self.sequence = sequence
        self._shared = shared
        self.first = [_Rate(one.value) for one in shared.first]
        self.later = _Rate(shared.later.value)
        self.any_draft = [_Rate(one.value) for one in shared.any_draft]
        self.num_proposed: deque[int] = deque(maxlen=_STEPS_TO_REPORT)
        self.most = NO_LIMIT

    def rates(self) -> Rates:
        """Those of the next step."""
        has_drafts = not self.num_proposed or self.num_proposed[-1] > 0
        return Rates(
            self.first[has_drafts].value, self.later.value, self.any_draft[has_drafts].value
        )

    def report(self, forecast: bool, num_proposed: int, num_scheduled: int) -> None:
        """So many drafts were scheduled, and the sequence had so many, where any were forecast or
        not."""
        self.num_proposed.append(num_proposed)
        of_all, has_any = self._shared.any_draft[forecast], int(num_proposed > 0)
        self.any_draft[forecast].observe(has_any, 1, of_all.value)
        of_all.observe(has_any, 1)
        fell_short = 0 < num_proposed < num_scheduled
        self.most = 1 + 2 * num_proposed if fell_short else NO_LIMIT

    def observe(self, forecast: bool, right: int, drafted: int) -> None:
        """Of `drafted` drafts the first `right` ones were accepted, where any were forecast or
        not. Those after the first rejected one tell nothing."""
        tried = min(right + 1, drafted)
        shared = self._shared
        for rate, of_all, num_right, num_tried in (
            (self.first[forecast], shared.first[forecast], min(right, 1), min(tried, 1)),
            (self.later, shared.later, max(right - 1, 0), max(tried - 1, 0)),
        ):
            rate.observe(num_right, num_tried, of_all.value)
            of_all.observe(num_right, num_tried)

    def had_forecast(self) -> bool:
        """Whether drafts were forecast when the step that is observed now was planned."""
        known = len(self.num_proposed) == _STEPS_TO_REPORT
        return not known or self.num_proposed[0] > 0
