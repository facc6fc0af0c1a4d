"""The sampler on the CPU.

A row's token depends on the row alone: its logits, its request's sampling parameters, and the
tokens before it. See `SamplingParams` for the steps and their order. In a row inside a prompt the
next token is given, and only its logprob is computed.
"""

from __future__ import annotations

import dataclasses
import operator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight.core.request import Candidate
from inflight.core.sequence import Sequence
from inflight_kernels.torch_ops import sampling as ops
from inflight_kernels.torch_ops.sampling import NO_ALLOWED_TOKENS, NOT_FINITE, OK

# What the request options are called there: their fields in order.
_penalties_of = operator.attrgetter(*(field.name for field in dataclasses.fields(ops.Penalties)))
_filters_of = operator.attrgetter(*(field.name for field in dataclasses.fields(ops.Filters)))


@dataclass(frozen=True, slots=True)
class LogitsRow:
    """A row of logits, for the token after sequence.token_ids + tail.

    Attributes:
        sequence: of the row.
        tail: draft tokens; mostly none.
        mask: [ceil(V / 32)] int32, bits of the tokens that its grammar allows; None for all.
        given: the prompt's next token, in a row inside a prompt; None where one is sampled.
    """

    sequence: Sequence
    tail: list[int]
    mask: npt.NDArray[np.int32] | None = None
    given: int | None = None

    @property
    def position(self) -> int:
        """Position of the sampled token."""
        return len(self.sequence.token_ids) + len(self.tail)

    @property
    def num_top_logprobs(self) -> int | None:
        """Top logprobs to report; None to report nothing."""
        if self.given is None:
            return self.sequence.num_candidates
        return self.sequence.request.params.num_prompt_logprobs


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """Sampled tokens, per row. A row whose status is not OK has token 0 and logprob 0.

    Attributes:
        token_ids: the tokens.
        logprobs: of these, under the model's own distribution, before penalties and temperature.
        statuses: OK, NOT_FINITE or NO_ALLOWED_TOKENS of `inflight_kernels.torch_ops.sampling`.
        candidates: the token itself, then the row's num_top_logprobs most probable ones (see
            `request.Candidate`); [] if not requested.
    """

    token_ids: list[int]
    logprobs: list[float]
    statuses: list[int]
    candidates: list[list[Candidate]]


def sample(logits: Tensor, rows: list[LogitsRow]) -> SamplerOutput:
    """Sample a token for each row.

    Args:
        logits: [s, V] float32, which may be changed.
        rows: s, one for each row of logits.
    """
    logprobs = ops.log_probs(logits)
    statuses = [OK if finite else NOT_FINITE for finite in ops.finite_rows(logits).tolist()]
    for index, row in enumerate(rows):
        if statuses[index] == OK and row.given is None and _adjust(logits[index], row):
            any_left = bool(logits[index].amax() > float("-inf"))
            statuses[index] = OK if any_left else NO_ALLOWED_TOKENS
    fine = [index for index, status in enumerate(statuses) if status == OK]
    params = [row.sequence.request.params for row in rows]
    free = [index for index in fine if rows[index].given is None]
    drawn = [index for index in free if params[index].effective_temperature > 0.0]
    # The token of a failed row is not used.
    chosen = torch.tensor([row.given or 0 for row in rows], dtype=torch.int64)
    if len(drawn) < len(free):
        greedy = [index for index in free if params[index].effective_temperature == 0.0]
        chosen[greedy] = ops.greedy(logits)[greedy]
    plain = [index for index in drawn if not params[index].has_rare_filters]
    if plain:
        chosen[plain] = _draw(logits[plain], [rows[index] for index in plain])
    for index in drawn:
        if params[index].has_rare_filters:
            chosen[index] = _draw_filtered(logits[index], rows[index])
    token_ids = chosen.tolist()
    values = logprobs.gather(1, chosen.unsqueeze(1)).squeeze(1).tolist()
    for index, status in enumerate(statuses):
        if status != OK:
            token_ids[index], values[index] = 0, 0.0
    candidates: list[list[Candidate]] = [[] for _ in rows]
    for index in fine:
        number = rows[index].num_top_logprobs
        if number is not None:
            ranked = logprobs[index]
            # A beam's candidates are the tokens that are not banned.
            if rows[index].sequence.beam_of is not None:
                ranked = ranked.masked_fill(logits[index] == float("-inf"), float("-inf"))
            candidates[index] = _candidates(ranked, token_ids[index], number)
    return SamplerOutput(token_ids, values, statuses, candidates)


def _adjust(logits: Tensor, row: LogitsRow) -> bool:
    """Apply penalties, biases and bans to logits [V] in place; True if a token may be banned."""
    sequence = row.sequence
    params = sequence.request.params
    vocab_size = len(logits)
    if params.has_penalties:
        prompt_len = sequence.num_prompt_tokens
        tokens = np.array([*sequence.token_ids, *row.tail], np.int64)
        output_ids, counts = np.unique(tokens[prompt_len:], return_counts=True)
        ops.apply_penalties(
            logits,
            np.unique(tokens),
            output_ids,
            counts,
            ops.Penalties(*_penalties_of(params)),
        )
    if row.mask is not None:
        bits = np.unpackbits(row.mask.view(np.uint8), bitorder="little")[:vocab_size]
        logits[torch.from_numpy(bits == 0)] = float("-inf")
    adjustment = sequence.logit_adjustments.of_row(sequence.token_ids, row.tail)
    if adjustment.is_empty:
        return row.mask is not None
    known = sum(token_id < vocab_size for token_id in adjustment.token_ids)  # ascending
    if known:
        ops.add_biases(logits, adjustment.token_ids[:known], adjustment.biases[:known])
    if adjustment.allowed:
        allowed = [id_ for id_ in adjustment.allowed if id_ < vocab_size]
        ops.allow_only(logits, torch.tensor(allowed, dtype=torch.int64))
    return True


def _draw(logits: Tensor, rows: list[LogitsRow]) -> Tensor:
    """Draw for each row from its logits [n, V] -> [n]."""
    params = [row.sequence.request.params for row in rows]
    return ops.draw(
        logits,
        np.array([p.effective_temperature for p in params]),
        np.array([p.top_k for p in params], np.int64),
        np.array([p.top_p for p in params]),
        np.array([p.min_p for p in params]),
        # Keyed by seed and position: recomputation after preemption, the batch, and drafts leave
        # the random number unchanged.
        np.array([ops.uniform(row.sequence.seed, row.position) for row in rows]),
    )


def _draw_filtered(logits: Tensor, row: LogitsRow) -> int:
    """Draw from a row's logits [V] with the less common filters."""
    params, seed = row.sequence.request.params, row.sequence.seed
    return ops.draw_filtered(
        logits,
        params.effective_temperature,
        ops.Filters(*_filters_of(params)),
        ops.uniform(seed, row.position),
        ops.uniform(seed, row.position, ops.XTC),
    )


def _candidates(logprobs: Tensor, token_id: int, number: int) -> list[Candidate]:
    """The token itself, then the most probable ones, of logprobs [V]."""
    ids = ops.top(logprobs, number)
    place = ops.rank(logprobs, token_id)
    return Candidate.ranked(
        token_id, float(logprobs[token_id]), place, ids.tolist(), logprobs[ids].tolist()
    )
