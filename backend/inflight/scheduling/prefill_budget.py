"""Chooses how many prompt tokens a step may compute, so that decoding requests keep a target
inter-token latency (ITL).

With chunked prefill (Sarathi-Serve, OSDI 2024), the size of chunks trades the ITL of some requests
for the TTFT of others. Which size meets a target depends on the machine, the model, the batch and
the prompt's length, so the time of a step is learned from recent ones:

    seconds = base + a * decodes + m (with prompts beside them) + b * prompt tokens + c * pairs

where a pair is a prompt token and a key that it attends to: chunks of a long prompt become smaller
as its context grows. In truth a step is not linear: some tokens more cost nothing while memory
bounds its products, so that small chunks say little of large ones. A model of recent steps is exact
where the engine works now, and one of the last steps of each size decides how far from there it
holds.

With a target TTFT as well, the ITL rises less than its target allows as long as prompts will be
computed in time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from inflight.core.batch import Batch
from inflight.core.sequence import Sequence

FEWEST_TOKENS = 32
"""Of prompts in a step, even if decodes alone exceed the target: prompts must advance."""

GENTLE = 0.5
"""With a target TTFT, prompts that are in time add at most so much to a step, relative to its time
with decodes alone."""

# Of the target TTFT, for which prompts are planned: step times are estimates.
_PLANNED = 0.9
# Sizes are the binary digits of the number of prompt tokens.
_MAX_SIZE = 20
_FIRST_TOKENS = 256
# How much larger than recent chunks the next one may be, whatever is known of large ones; than all
# chunks so far in any case.
_GROWTH = 1.5
# Decay per step of the same kind: contexts grow, and other engines come and go on the same GPU.
_MEMORY = 0.97
# Of the sums of squares, so that what has not varied yet has no influence.
_RIDGE = 1e-4
# Outliers are clipped to this multiple of the predicted step time: a kernel was compiled, or the
# machine was busy. Not where the step is larger than any before: there the prediction is a guess.
_OUTLIER = 4.0
# Typical magnitudes, which make sums of squares comparable. What two coefficients explain equally
# well goes to the one with the smaller scale: to the base rather than to prompts beside decodes.
_SCALES = np.array([1.0, 64.0, 4.0, 512.0, 512.0 * 8192.0])


class _Due(NamedTuple):
    """Work of prompts that is to be done within some time.

    Attributes:
        num_tokens, num_pairs: prompt tokens and pairs.
        seconds: from now on.
    """

    num_tokens: int
    num_pairs: float
    seconds: float


StepSize = tuple[float, float, float, float, float]
"""What the time of a step depends on; see `StepTimes.observe`."""


class StepTimes:
    """Least squares over recent steps with decaying weights; no coefficient is negative.

    Steps decay by those of their kind alone: what prompts cost is still known after a long time of
    decodes.

    Args:
        num_kinds: kinds of steps.
    """

    def __init__(self, num_kinds: int) -> None:
        self._squares = np.zeros((num_kinds, len(_SCALES), len(_SCALES)))
        self._products = np.zeros((num_kinds, len(_SCALES)))
        self._coefficients = np.zeros(len(_SCALES))
        self._is_solved = True
        self._largest = np.zeros(len(_SCALES))

    def observe(self, kind: int, size: StepSize, seconds: float) -> None:
        """Record a step.

        Args:
            kind: below num_kinds.
            size: 1, the number of decodes, whether there are prompts as well, and the numbers of
                prompt tokens and pairs.
            seconds: its duration.
        """
        x = np.array(size) / _SCALES
        expected = float(x @ self._coefficients)
        if expected > 0.0 and (x <= self._largest).all():
            seconds = min(seconds, _OUTLIER * expected)
        self._largest = np.maximum(self._largest, x)
        self._squares[kind] = _MEMORY * self._squares[kind] + np.outer(x, x)
        self._products[kind] = _MEMORY * self._products[kind] + seconds * x
        self._is_solved = False  # in most steps nobody asks

    def coefficients(self) -> tuple[float, float, float, float, float]:
        """Seconds of a step, of each decode, of prompts beside decodes, and of each prompt token
        and pair."""
        if not self._is_solved:
            self._coefficients, self._is_solved = self._solve(), True
        base, decode, mixed, token, pair = (self._coefficients / _SCALES).tolist()
        return base, decode, mixed, token, pair

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
        self._recent = StepTimes(2)  # without and with prompts
        self._of_sizes = StepTimes(_MAX_SIZE + 1)
        # Prompt tokens of the largest step so far, and of recent ones that decode.
        self._largest = self._recently = _FIRST_TOKENS / _GROWTH

    def tokens(
        self,
        num_decodes: int,
        prompts: Collection[Sequence],
        num_waiting: int = 0,
        num_waiting_tokens: int = 0,
        now: float = 0.0,
    ) -> int:
        """How many prompt tokens fit into the next step, at least FEWEST_TOKENS.

        Args:
            num_decodes: tokens of decodes in the step, drafts included.
            prompts: that are being computed, in order of admission.
            num_waiting: prompts in the queue.
            num_waiting_tokens: tokens of these.
            now: seconds, of the clock of `SequenceGroup.queued_at`.
        """
        due = list(self._due(prompts, num_waiting, num_waiting_tokens, now))
        context = max((one.num_computed for one in prompts), default=0)
        found, far = (
            self._tokens_by(times, num_decodes, context, due)
            for times in (self._recent, self._of_sizes)
        )
        known = max(min(far, _GROWTH * self._largest), _GROWTH * self._recently)
        found = min(found, known)
        return max(FEWEST_TOKENS, int(found) // FEWEST_TOKENS * FEWEST_TOKENS)

    def _tokens_by(
        self, times: StepTimes, num_decodes: int, context: int, due: list[_Due]
    ) -> float:
        """Prompt tokens that fit by one of the models."""
        base, decode, mixed, token, pair = times.coefficients()
        alone = base + decode * num_decodes + mixed
        room = self._target_s - alone
        if self._ttft_target_s is not None:
            in_time = GENTLE * (alone - mixed) - mixed
            for one in due:
                work = token * one.num_tokens + pair * one.num_pairs
                in_time = max(in_time, _in_time(work, one.seconds, alone))
            room = min(room, in_time)
        return _fitting(room, token + pair * context, pair)

    def _due(
        self, prompts: Iterable[Sequence], num_waiting: int, num_waiting_tokens: int, now: float
    ) -> Iterator[_Due]:
        """The work of each prompt with those before it, and of the queue behind them, most of which
        has just arrived. Nothing without a target TTFT."""
        target = self._ttft_target_s
        if target is None:
            return
        num_tokens, num_pairs = 0, 0.0
        for prompt in prompts:
            length = prompt.num_uncomputed
            num_tokens += length
            num_pairs += length * (prompt.num_computed + length / 2)
            seconds = prompt.group.queued_at + _PLANNED * target - now
            yield _Due(num_tokens, num_pairs, seconds)
        if num_waiting:
            # As if they were of the same length.
            num_pairs += num_waiting_tokens * num_waiting_tokens / num_waiting / 2
            yield _Due(num_tokens + num_waiting_tokens, num_pairs, _PLANNED * target)

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
        is_mixed = decodes > 0.0 and prompt_tokens > 0.0
        self._largest = max(self._largest, prompt_tokens)
        if is_mixed:
            self._recently = max(_MEMORY * self._recently, prompt_tokens)
        size = (1.0, decodes, float(is_mixed), prompt_tokens, pairs)
        self._recent.observe(int(prompt_tokens > 0), size, seconds)
        self._of_sizes.observe(min(_MAX_SIZE, int(prompt_tokens).bit_length()), size, seconds)


def _fitting(room: float, each: float, pair: float) -> float:
    """The largest n with n * each + n * n / 2 * pair <= room."""
    if room <= 0.0:
        return 0.0
    if each <= 0.0 and pair <= 0.0:
        return math.inf
    # The positive root, without cancellation or underflow if `pair` is small.
    return 2.0 * room / (each + math.hypot(each, math.sqrt(2.0 * pair) * math.sqrt(room)))


def _in_time(work: float, seconds: float, alone: float) -> float:
    """What prompts add to each step of `alone` if steps of equal length compute them in time.

    Args:
        work: of the prompts in total, in seconds as all others.
    """
    left = seconds - work
    return work * alone / left if left > 0.0 else math.inf
