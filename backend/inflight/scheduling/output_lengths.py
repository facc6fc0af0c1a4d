"""How long outputs become, learned from the requests that have ended.

A survival function for each tenant of a class, and one for all: the probability that an output has
more than so many tokens. An output that ended at its `max_tokens` tells only that it would have
been at least as long, so the estimate is that of Kaplan and Meier (1958), over bins whose width
grows with the length. Beyond the longest output so far it is assumed that half of those that reach
a length reach twice of it.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from inflight.scheduling.waiting_queue import QueueKey

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

MIN_SAMPLES = 64
"""Ended requests that an estimate needs: a tenant's own, before those of all are used instead."""

MAX_KEYS = 64
"""Tenants with estimates of their own, those of the latest requests: names may be chosen by
clients, so that there is no end of them."""

CERTAIN = 0
"""The row of outputs that end at `max_tokens` and never before."""

_ALL = 1
_FIRST = 2
# Decay per ended request: what users ask for changes.
_MEMORY = 1.0 - 1.0 / 1024.0
_BINS_PER_OCTAVE = 8
_MOST_TOKENS = 1 << 17
# Weight of the assumption that half of those that reach a length reach twice of it.
_PRIOR = 0.5


def _bins() -> npt.NDArray[np.int32]:
    """The bin of each number of tokens; below 8 tokens each has its own."""
    tokens = np.arange(_MOST_TOKENS)
    octaves = np.log2(np.maximum(tokens, _BINS_PER_OCTAVE) / _BINS_PER_OCTAVE)
    wide = _BINS_PER_OCTAVE + (octaves * _BINS_PER_OCTAVE).astype(np.int32)
    return np.where(tokens < _BINS_PER_OCTAVE, tokens, wide).astype(np.int32)


_BIN_OF = _bins()
_NUM_BINS = int(_BIN_OF[-1]) + 1
_PRIOR_HAZARD = 1.0 - 0.5 ** (1.0 / _BINS_PER_OCTAVE)


class OutputLengths:
    """Survival functions, each a row; rows are numbers that remain valid.

    The row of a tenant that was forgotten becomes another one's: requests that run then are taken
    for that tenant's.

    Attributes:
        mean: tokens of an output, those that were cut included; 0 if no request has ended.
    """

    def __init__(self) -> None:
        num_rows = _FIRST + MAX_KEYS
        self._reached = np.zeros((num_rows, _NUM_BINS))  # outputs that reached a bin
        self._ended = np.zeros((num_rows, _NUM_BINS))  # and those of them that ended in it
        self._num_samples = [0] * num_rows
        self.mean = 0.0
        self._survival = np.ones((num_rows, _NUM_BINS), np.float32)
        self._used = np.zeros(num_rows, np.int32)  # the row that is used for each
        self._used[_ALL:] = _ALL
        self._changed: set[int] = set()
        self._rows: OrderedDict[QueueKey, int] = OrderedDict()  # latest request last

    @property
    def is_known(self) -> bool:
        """Whether enough requests have ended for any estimate."""
        return self._num_samples[_ALL] >= MIN_SAMPLES

    def row_of(self, key: QueueKey) -> int:
        """The row of a tenant in a class."""
        row = self._rows.get(key)
        if row is None:
            if len(self._rows) == MAX_KEYS:
                _, row = self._rows.popitem(last=False)
                self._reached[row] = self._ended[row] = self._num_samples[row] = 0
                self._used[row] = _ALL
            else:
                row = _FIRST + len(self._rows)
            self._rows[key] = row
        self._rows.move_to_end(key)
        return row

    def observe(self, key: QueueKey, num_tokens: int, is_cut: bool) -> None:
        """A request has ended with so many tokens of output; is_cut: at its `max_tokens`."""
        weight = max(1.0 - _MEMORY, 1.0 / (1 + self._num_samples[_ALL]))
        self.mean += weight * (num_tokens - self.mean)
        last = _BIN_OF[min(num_tokens, _MOST_TOKENS - 1)]
        for row in (_ALL, self.row_of(key)):
            self._reached[row] *= _MEMORY
            self._ended[row] *= _MEMORY
            # One that is cut has not been seen in the rest of its bin.
            self._reached[row, : last + (not is_cut)] += 1.0
            self._ended[row, last] += not is_cut
            self._num_samples[row] += 1
            if self._num_samples[row] == MIN_SAMPLES:
                self._used[row] = row
            self._changed.add(row)

    def survival(self, rows: Ints, num_tokens: Ints) -> Floats:
        """Of outputs of these rows, the share that has more than so many tokens.

        Args:
            rows, num_tokens: of shapes that broadcast to that of the result.
        """
        for row in self._changed:
            hazards = (self._ended[row] + _PRIOR * _PRIOR_HAZARD) / (self._reached[row] + _PRIOR)
            self._survival[row] = np.cumprod(1.0 - hazards)
        self._changed.clear()
        bins = _BIN_OF.take(num_tokens, mode="clip")
        return self._survival.take(self._used[rows] * _NUM_BINS + bins)
