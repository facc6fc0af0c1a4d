"""Chooses how many prompt tokens a step may compute, so that decoding requests keep a target
inter-token latency (ITL).

With chunked prefill (Sarathi-Serve, OSDI 2024), the size of chunks trades the ITL of some requests
for the TTFT of others. Which size meets a target depends on the machine, the model, the batch and
the prompt's length, so the time of a step is learned from recent ones:

    seconds = base + a * decodes + b * prompt tokens + c * pairs

where a pair is a prompt token and a key that it attends to: chunks of a long prompt become smaller
as its context grows.

With a target TTFT as well, the ITL rises less than its target allows as long as prompts will be
computed in time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator

import numpy as np
import numpy.typing as npt

from inflight.core.batch import Batch
from inflight.core.sequence import Sequence

FEWEST_TOKENS = 32
"""Of prompts in a step, even if decodes alone exceed the target: prompts must advance."""

GENTLE = 0.75
"""With a target TTFT, prompts that are in time add at most so much to a step, relative to its time
with decodes alone."""

# Of the time until a prompt's target TTFT, for which it is planned: step times are estimates.
_PLANNED = 0.9
_FIRST_TOKENS = 256
# How much larger than all chunks so far the next one may be.
_GROWTH = 2.0
# Decay per step of the same kind: contexts grow, and other engines come and go on the same GPU.
_MEMORY = 0.97
# Of the sums of squares, so that what has not varied yet has no influence.
_RIDGE = 1e-4
# Outliers are clipped to this multiple of the predicted step time: a kernel was compiled, or the
# machine was busy. Not where the step is larger than any before: there the prediction is a guess.
_OUTLIER = 4.0
# Typical magnitudes, which make sums of squares comparable.
_SCALES = np.array([1.0, 64.0, 512.0, 512.0 * 8192.0])


class StepTimes:
    """Least squares over recent steps with decaying weights; no coefficient is negative.

    Steps with and without prompts decay apart: what prompts cost is still known after a long time
    of decodes alone.
    """

    def __init__(self) -> None:
        self._squares = np.zeros((2, len(_SCALES), len(_SCALES)))
        self._products = np.zeros((2, len(_SCALES)))
        self._coefficients = np.zeros(len(_SCALES))
        self._is_solved = True
        self._largest = np.zeros(len(_SCALES))

    def observe(self, size: tuple[float, float, float, float], seconds: float) -> None:
        """Record a step.

        Args:
            size: 1, and the numbers of decodes, prompt tokens and pairs.
            seconds: its duration.
        """
        x = np.array(size) / _SCALES
        expected = float(x @ self._coefficients)
        if expected > 0.0 and (x <= self._largest).all():
            seconds = min(seconds, _OUTLIER * expected)
        self._largest = np.maximum(self._largest, x)
        kind = int(size[2] > 0.0)
        self._squares[kind] = _MEMORY * self._squares[kind] + np.outer(x, x)
        self._products[kind] = _MEMORY * self._products[kind] + seconds * x
        self._is_solved = False  # in most steps nobody asks

    def coefficients(self) -> tuple[float, float, float, float]:
        """Seconds of a step, and of each decode, prompt token and pair in it."""
        if not self._is_solved:
            self._coefficients, self._is_solved = self._solve(), True
        base, decode, token, pair = (self._coefficients / _SCALES).tolist()
        return base, decode, token, pair

    def _solve(self) -> npt.NDArray[np.float64]:
        """The best coefficients, dropping those that would be negative, one at a time."""
        found = np.zeros(len(_SCALES))
        all_squares, products = self._squares.sum(axis=0), self._products.sum(axis=0)
        used = list(range(len(_SCALES)))
        while used:
            squares = all_squares[np.ix_(used, used)]
            ridge = _RIDGE * max(1e-9, float(np.trace(squares))) * np.eye(len(used))
            values = np.linalg.solve(squares + ridge, products[used])
            worst = int(values.argmin())
            if values[worst] >= 0.0:
                found[used] = values
                break
            del used[worst]
        return found


class PrefillBudget:
    """Limits the prompt tokens of steps that also decode.

    Args:
        itl_target_s: the time that such a step may take, in seconds.
        ttft_target_s: the time from a prompt's arrival in the queue to its first token, in seconds,
            beyond which such steps take all of that; None for always.
    """

    def __init__(self, itl_target_s: float, ttft_target_s: float | None = None) -> None:
        self._target_s = itl_target_s
        self._ttft_target_s = ttft_target_s
        self._times = StepTimes()
        self._most_tokens = _FIRST_TOKENS / _GROWTH  # of prompts in a step so far

    def tokens(
        self,
        num_decodes: int,
        prompts: Collection[Sequence],
        num_waiting_tokens: int = 0,
        now: float = 0.0,
    ) -> int:
        """How many prompt tokens fit into the next step, at least FEWEST_TOKENS.

        Args:
            num_decodes: tokens of decodes in the step, drafts included.
            prompts: that are being computed, in order of admission.
            num_waiting_tokens: of prompts in the queue.
            now: seconds, of the clock of `SequenceGroup.queued_at`.
        """
        context = max((one.num_computed for one in prompts), default=0)
        base, decode, token, pair = self._times.coefficients()
        alone = base + decode * num_decodes
        each = token + pair * context
        found = _fitting(self._target_s - alone, each, pair)
        if self._ttft_target_s is not None:
            gentle = _fitting(min(GENTLE * alone, self._target_s - alone), each, pair)
            for num_tokens, seconds in self._due(prompts, num_waiting_tokens, now):
                in_time = _in_time(num_tokens, seconds, alone, each + pair * num_tokens / 2)
                gentle = max(gentle, in_time)
            found = min(found, gentle)
        found = min(found, _GROWTH * self._most_tokens)
        return max(FEWEST_TOKENS, int(found) // FEWEST_TOKENS * FEWEST_TOKENS)

    def _due(
        self, prompts: Iterable[Sequence], num_waiting_tokens: int, now: float
    ) -> Iterator[tuple[int, float]]:
        """How many prompt tokens are to be computed within how many seconds, for each prompt with
        those before it, and for the queue behind them, most of which has just arrived."""
        target = self._ttft_target_s or 0.0
        num_tokens = 0
        for prompt in prompts:
            num_tokens += prompt.num_uncomputed
            yield num_tokens, _PLANNED * (prompt.group.queued_at + target - now)
        if num_waiting_tokens:
            yield num_tokens + num_waiting_tokens, _PLANNED * target

    def observe(self, batch: Batch, seconds: float) -> None:
        """Learn from a step that has been computed."""
        decodes = prompt_tokens = pairs = 0.0
        if batch.num_tokens == len(batch.chunks):
            decodes = batch.num_tokens
        else:
            for chunk in batch.chunks:
                if chunk.length == 1 + chunk.num_drafts:
                    decodes += chunk.length
                else:
                    prompt_tokens += chunk.length
                    pairs += chunk.length * (chunk.start + chunk.length / 2)
        self._most_tokens = max(self._most_tokens, prompt_tokens)
        self._times.observe((1.0, decodes, prompt_tokens, pairs), seconds)


def _fitting(room: float, each: float, pair: float) -> float:
    """The largest n with n * each + n * n / 2 * pair <= room."""
    if room <= 0.0:
        return 0.0
    if each <= 0.0 and pair <= 0.0:
        return math.inf
    # The positive root, without cancellation if `pair` is small.
    return 2.0 * room / (each + math.sqrt(each * each + 2.0 * pair * room))


def _in_time(num_tokens: int, seconds: float, alone: float, each: float) -> float:
    """The fewest tokens in each step with which steps of `alone` and `each` for a token, in
    seconds, compute all of them in time."""
    left = seconds - num_tokens * each
    return num_tokens * alone / left if left > 0.0 else math.inf
