"""What a step uploads: the arrays of its chunks, and the diffs to what the device has."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np

from inflight.core.batch import Chunk
from inflight.core.sequence import Sequence
from inflight.sampling.logit_adjustments import Adjustment
from inflight.sampling.params import SamplingParams
from inflight_kernels.ops import sampling

# Fields of `sampling.ROW_PARAMS` that are request options.
_ROW_OPTIONS = tuple(
    name
    for name in sampling.ROW_PARAMS.names or ()
    if name in SamplingParams.__struct_fields__ and name not in ("seed", "temperature")
)


class SamplerStages(enum.Flag):
    """Optional sampler stages, beyond logits and temperature. Most requests need none."""

    NONE = 0
    FILTERS = enum.auto()
    RARE_FILTERS = enum.auto()  # see `sampling.options.Option.stage`
    PENALTIES = enum.auto()
    MASKS = enum.auto()
    TOP_LOGPROBS = enum.auto()  # logprobs of other tokens

    @classmethod
    def of(cls, sequence: Sequence) -> SamplerStages:
        """Those that a sequence's rows need."""
        params = sequence.request.params
        found = cls.NONE
        if params.effective_temperature > 0.0:
            if params.has_filters:
                found |= cls.FILTERS
            if params.has_rare_filters:
                found |= cls.RARE_FILTERS
        if params.has_penalties:
            found |= cls.PENALTIES
        if params.allowed_token_ids or sequence.grammar is not None:
            found |= cls.MASKS
        if sequence.num_candidates is not None:
            found |= cls.TOP_LOGPROBS
        return found


@dataclass(slots=True)
class Resident:
    """A sequence with a slot, and how much of its block tables is on the device.

    Attributes:
        sequence: which.
        generation: the sequence's when it got the slot.
        slot: its own.
        stages: optional sampler stages that its rows need.
        is_plain: no optional sampler stages and no logit adjustments.
        num_blocks: by table, of those on the device.
        capacity: tokens that these blocks hold.
    """

    sequence: Sequence
    generation: int
    slot: int
    stages: SamplerStages
    is_plain: bool
    num_blocks: list[int]
    capacity: int = 0

    @property
    def is_stale(self) -> bool:
        """Whether the sequence has ended or was preempted since, and the slot can be reclaimed."""
        return self.generation != self.sequence.generation


@dataclass(slots=True)
class StepRows:
    """The arrays of a step while it is written (see `StepLayout`).

    Attributes:
        slots, sample_slots, starts, tokens, row_start, bias_starts: as uploaded.
        lengths: tokens of each chunk.
        special: rows that need optional sampler stages.
        scored: first row of each chunk with prompt logprobs.
    """

    slots: list[int] = field(default_factory=list)
    sample_slots: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    row_start: list[int] = field(default_factory=lambda: [0])
    bias_starts: list[int] = field(default_factory=lambda: [0])
    special: list[tuple[int, Resident]] = field(default_factory=list)
    scored: list[tuple[int, Chunk]] = field(default_factory=list)

    def add_scores(self, chunk: Chunk, num_biases: int) -> int:
        """Add the rows of a chunk's scores; the row after them."""
        first_row = self.row_start[-1]
        self.scored.append((first_row, chunk))
        self.bias_starts += [num_biases] * chunk.num_scores
        return first_row + chunk.num_scores


@dataclass(slots=True)
class Changes:
    """The diffs of a step, as flat lists of int32.

    Attributes:
        places, blocks: new entries of block tables.
        slots, row_params: of newly admitted sequences.
        bias_ids, biases: of the step's rows.
        history_places, history: tokens of newly admitted sequences.
        ban_rows, ban_ids: of the rows of beams.
        stages, num_drafts: see `SubmittedStep`.
    """

    places: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    row_params: list[int] = field(default_factory=list)
    bias_ids: list[int] = field(default_factory=list)
    biases: list[float] = field(default_factory=list)
    history_places: list[int] = field(default_factory=list)
    history: list[int] = field(default_factory=list)
    ban_rows: list[int] = field(default_factory=list)
    ban_ids: list[int] = field(default_factory=list)
    stages: SamplerStages = SamplerStages.NONE
    num_drafts: int = 0

    def arrays(self) -> tuple[list[int], ...]:
        """All of them, in upload order."""
        return (
            self.places,
            self.blocks,
            self.slots,
            self.row_params,
            self.bias_ids,
            np.array(self.biases, np.float32).view(np.int32).tolist(),
            self.history_places,
            self.history,
            self.ban_rows,
            self.ban_ids,
        )

    def add_bans(self, row: int, adjustment: Adjustment, vocab_size: int) -> None:
        """Ban the tokens of a beam's adjustment in a row: beams have no additive biases."""
        banned = [token_id for token_id in adjustment.token_ids if token_id < vocab_size]
        self.ban_rows += [row] * len(banned)
        self.ban_ids += banned


def row_params(sequence: Sequence, slot: int) -> list[int]:
    """A sequence's sampling parameters, as int32 words of `sampling.ROW_PARAMS`."""
    params = sequence.request.params
    row = np.zeros(1, sampling.ROW_PARAMS)
    row["seed"] = sequence.seed
    row["temperature"] = params.effective_temperature
    for name in _ROW_OPTIONS:
        row[name] = getattr(params, name)
    row["slot"] = slot if params.has_penalties else -1
    words: list[int] = row.view(np.int32).tolist()
    return words
