"""The running batch on a GPU: which sequence has which slot, and what the device must be told.

The device keeps of each running sequence its block table, its row_params and its last token. A step
is
sent as one copy: what it computes, and what changed since the last one.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight.core.batch import Batch, Chunk
from inflight.core.sequence import Sequence
from inflight.execution.grammar_masks import GrammarMasks
from inflight.execution.graph_buckets import StepSize
from inflight.sampling.logit_adjustments import Adjustment
from inflight.sampling.params import SamplingParams
from inflight_kernels.ops import batch_state, cache, sampling
from inflight_kernels.ops.batch_state import FROM_DEVICE, BatchState, Step, StepLayout

RING = 3
"""Steps whose host memory is in use at a time: one computes, one is read, one is written."""

# What changes in a step goes along with it as far as there is room: 1 MiB, which only a crowd of
# long prompts, found in the prefix cache, exceeds.
_UPDATE_WORDS = 1 << 18

END_OF_TABLE = -1
"""Stands behind a sequence's last block, for those who write ahead of the host."""

_ROW_PARAMS_WORDS = sampling.ROW_PARAMS.itemsize // 4
# Its fields that are options as the request has them.
_ROW_OPTIONS = tuple(
    name
    for name in sampling.ROW_PARAMS.names or ()
    if name in SamplingParams.__struct_fields__ and name not in ("seed", "temperature")
)
_Ints = npt.NDArray[np.int32]


class SamplerStages(enum.Flag):
    """What choices need beyond the logits and a temperature. Most need nothing of it."""

    NONE = 0
    FILTERS = enum.auto()
    RARE_FILTERS = enum.auto()  # see `sampling.options.Option.stage`
    PENALTIES = enum.auto()
    MASKS = enum.auto()
    TOP_LOGPROBS = enum.auto()  # log probabilities of other tokens, too

    @classmethod
    def of(cls, sequence: Sequence) -> SamplerStages:
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
class _Resident:
    """A sequence that has a slot, and how much of its block table the device has."""

    sequence: Sequence
    generation: int
    slot: int
    stages: SamplerStages
    is_plain: bool  # it has no stages, and the host has nothing to say of single tokens
    num_blocks: int = 0

    @property
    def is_stale(self) -> bool:
        return self.generation != self.sequence.generation


@dataclass(frozen=True, slots=True)
class SubmittedStep:
    """A step that is on its way to the device.

    Attributes:
        size: of the step.
        row_start: [num_chunks + 1] chunk i has rows of logits row_start[i]:row_start[i + 1]; of
            these the first num_scores are those of its scores.
        num_drafts: that any of its sequences is to have in its next step.
        ring_index: where in the ring its results will be.
        stages: of any of its choices.
        logit_bias: what rows add to logits; None if none does.
        bans: ([b], [b]) int64 on the device, rows of beams and tokens that are banned there: those
            are no candidates either. None if there are none.
    """

    size: StepSize
    row_start: list[int]
    ring_index: int
    stages: SamplerStages
    num_drafts: int
    logit_bias: sampling.LogitBias | None
    bans: tuple[Tensor, Tensor] | None


class SampledTokens(NamedTuple):
    """What a step chose for one chunk: the drafts that were right, and the token after them.

    Nothing, where the chunk does not sample.
    """

    token_ids: list[int]
    logprobs: list[float]
    status: int  # of the last one


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """How large the steps of a batch get.

    Attributes:
        max_num_seqs: sequences at once.
        max_num_batched_tokens: tokens in a step.
        table_width: blocks of the longest sequence.
        max_rows: rows of logits in a step: one for each sequence, draft and score.
        max_drafts: of a sequence.
        history_length: tokens of each sequence that the device keeps; 0 for none.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    table_width: int
    max_rows: int
    max_drafts: int = 0
    history_length: int = 0


class DeviceBatch:
    """Slots of sequences, and the memory through which steps go to the device and back.

    Args:
        limits: of its steps.
        vocab_size: of the model.
        device: the GPU.

    Attributes:
        step, state: what kernels read (see `inflight_kernels.ops.batch_state`).
        counts, prompt, masks: see `ops.sampling.PenaltyState` and `TokenMasks`; a row per slot.
    """

    def __init__(self, limits: BatchLimits, vocab_size: int, device: torch.device) -> None:
        self._layout = StepLayout(limits.max_rows, limits.max_num_batched_tokens, _UPDATE_WORDS)
        self._device = device
        self._vocab_size = vocab_size
        self.step = Step(self._layout, device)
        self._num_slots = max_num_seqs = limits.max_num_seqs
        self.state = BatchState(
            self._layout,
            max_num_seqs,
            limits.table_width,
            RING,
            device,
            limits.max_drafts,
            limits.history_length,
        )
        words = sampling.prompt_words(vocab_size)
        self.counts = torch.zeros(max_num_seqs, vocab_size, dtype=torch.int16, device=device)
        self.prompt = torch.zeros(max_num_seqs, words, dtype=torch.int32, device=device)
        # Of slots, whose requests name the tokens that they allow; then of a step's rows.
        num_masks = max_num_seqs + self._layout.max_rows
        self.masks = torch.zeros(num_masks, words, dtype=torch.int32, device=device)
        self._grammar_masks = self.masks[max_num_seqs:]
        self._pinned_masks: Tensor | None = None
        self._pinned = torch.zeros(
            RING, self._layout.size, dtype=torch.int32, pin_memory=torch.cuda.is_available()
        )
        self._host: list[_Ints] = [buffer.numpy() for buffer in self._pinned]
        self._results: _Ints = self.state.results.numpy()
        self._offsets = self._layout.offsets
        self._residents: dict[int, _Resident] = {}
        self._free = list(range(max_num_seqs))
        self._ring_index = 0

    def send(
        self,
        batch: Batch,
        size: StepSize,
        *kv_caches: Tensor,
        bucket: StepSize | None = None,
        drafts: Sequence_[list[int]] | None = None,
    ) -> SubmittedStep:
        """Bring a batch to the device, on the current stream: its copies, its diffs, its arrays.

        Args:
            batch: at least one chunk.
            size: of the batch.
            kv_caches: [..., num_blocks, block_size, G, D] each.
            bucket: of the CUDA graph that it goes to; None for none.
            drafts: of each chunk, num_drafts tokens; none where the device has them. None if it has
                them all.
        """
        self._ring_index = (self._ring_index + 1) % RING
        host = self._host[self._ring_index]
        changes = _Changes()
        num_chunks = size.num_chunks if bucket is None else bucket.num_chunks
        end, row_start = self._write_step(batch, num_chunks, host, changes, drafts)
        views: list[Tensor] = []
        for values in changes.arrays():
            view = slice(end, end + len(values))
            if view.stop <= len(host):
                host[view] = values
                end = view.stop
                views.append(self.step.buffer[view])
            else:  # a copy of its own, for which the host waits
                views.append(torch.tensor(values, dtype=torch.int32, device=self._device))
        pinned = self._pinned[self._ring_index]
        self.step.buffer[:end].copy_(pinned[:end], non_blocking=True)
        places, blocks, slots, row_params, bias_ids, biases, history_places, history = views[:8]
        ban_rows, ban_ids = views[8:]
        batch_state.write_tables(places, blocks, self.state.tables)
        batch_state.write_row_params(
            slots, row_params.view(-1, _ROW_PARAMS_WORDS), self.state.row_params
        )
        if self.state.history is not None:
            batch_state.write_tables(history_places, history, self.state.history)
        for first in range(0, len(batch.copies), cache.MAX_PAIRS):
            pairs = batch.copies[first : first + cache.MAX_PAIRS]
            sources, targets = torch.tensor(pairs, device=self._device).t().contiguous()
            for kv_cache in kv_caches:
                cache.copy_blocks(kv_cache, sources, targets)
        logit_bias = None
        if len(bias_ids):
            starts = self.step.bias_starts[: size.num_rows + 1]
            logit_bias = sampling.LogitBias(starts, bias_ids, biases.view(torch.float32))
        return SubmittedStep(
            size,
            row_start,
            self._ring_index,
            changes.stages,
            changes.num_drafts,
            logit_bias,
            (ban_rows.long(), ban_ids.long()) if len(ban_rows) else None,
        )

    def penalties(self, num_rows: int) -> sampling.PenaltyState:
        """What the penalties of a step's first rows count."""
        state = self.state
        tails = sampling.DraftTails(
            state.token_ids, state.tail_starts[:num_rows], state.tail_lengths[:num_rows]
        )
        return sampling.PenaltyState(self.counts, self.prompt, tails)

    def send_masks(self, batch: Batch, masks: GrammarMasks) -> None:
        """Bring what grammars allow to the device, after `send` and before the choice of tokens."""
        rows = [
            (chunk, masks.of_row(index, count))
            for index, chunk in enumerate(batch.chunks)
            if chunk.samples and chunk.sequence.grammar is not None
            for count in range(1 + chunk.num_drafts)
        ]
        if not rows:
            return
        if self._pinned_masks is None:
            self._pinned_masks = torch.zeros(
                RING,
                *self._grammar_masks.shape,
                dtype=torch.int32,
                pin_memory=torch.cuda.is_available(),
            )
        pinned = self._pinned_masks[self._ring_index, : len(rows)]
        host = pinned.numpy()
        for place, (chunk, words) in enumerate(rows):
            if words is None:  # its grammar cannot go on, and nor can the sequence
                continue
            host[place] = words
            allowed = chunk.sequence.request.params.allowed_token_ids
            if allowed:
                host[place] &= allowed_mask(allowed, self._vocab_size)
        self._grammar_masks[: len(rows)].copy_(pinned, non_blocking=True)

    def results(self, batch: Batch, sent: SubmittedStep) -> list[SampledTokens]:
        """What each chunk of a step that has ended chose."""
        tokens, logprobs, statuses, counts = self._results[sent.ring_index]
        num_rows, num_chunks = sent.size.num_rows, sent.size.num_chunks
        all_tokens = tokens[:num_rows].tolist()
        all_logprobs = logprobs[:num_rows].view(np.float32).tolist()
        all_statuses = statuses[:num_rows].tolist()
        found = []
        places = zip(batch.chunks, sent.row_start, counts[:num_chunks].tolist(), strict=False)
        for chunk, first_row, count in places:
            first = first_row + chunk.num_scores
            end = first + count
            status = all_statuses[end - 1] if count else sampling.OK
            found.append(SampledTokens(all_tokens[first:end], all_logprobs[first:end], status))
        return found

    def _write_step(
        self,
        batch: Batch,
        num_chunks: int,
        host: _Ints,
        changes: _Changes,
        drafts: Sequence_[list[int]] | None,
    ) -> tuple[int, list[int]]:
        """Write a step's arrays, as if it had so many chunks.

        Returns:
            Where in `host` its tokens end, and row_start.
        """
        rows = _StepRows()
        slots, sample_slots, starts = rows.slots, rows.sample_slots, rows.starts
        lengths, tokens = rows.lengths, rows.tokens
        row_start, bias_starts = rows.row_start, rows.bias_starts
        width = self.state.tables.shape[1]
        for index, chunk in enumerate(batch.chunks):
            sequence, num_drafts = chunk.sequence, chunk.num_drafts
            resident = self._residents.get(sequence.request_id)
            if resident is None or resident.is_stale or resident.sequence is not sequence:
                resident = self._admit(sequence, changes)
            if len(sequence.blocks) > resident.num_blocks:
                changes.add_blocks(resident, width)
            if sequence.num_drafts > changes.num_drafts:
                changes.num_drafts = sequence.num_drafts
            slots.append(resident.slot)
            sample_slots.append(resident.slot if chunk.samples else -1)
            lengths.append(chunk.length)
            known = sequence.token_ids
            if chunk.start < len(known):
                starts.append(chunk.start)
                tokens += known[chunk.start : chunk.end - num_drafts]
            else:
                starts.append(FROM_DEVICE)
                tokens.append(FROM_DEVICE)
            tail: list[int] = []
            if num_drafts:
                if drafts is not None:
                    tail = drafts[index]
                tokens += tail or [FROM_DEVICE] * num_drafts
            first_row = row_start[-1]
            if chunk.num_scores:
                first_row = rows.add_scores(chunk, len(changes.bias_ids))
                if not chunk.samples:
                    row_start.append(first_row)
                    continue
            row_start.append(first_row + 1 + num_drafts)
            if resident.is_plain:  # as most are; this loop is the host's share of a step
                bias_starts += [len(changes.bias_ids)] * (1 + num_drafts)
            else:
                self._adjust_rows(resident, chunk, tail, rows, changes)
        self._write_rows(rows, num_chunks, host, changes)
        return self._offsets["tokens"][0] + len(tokens), row_start

    def _adjust_rows(
        self, resident: _Resident, chunk: Chunk, tail: list[int], rows: _StepRows, changes: _Changes
    ) -> None:
        """Note what a chunk's rows, the last so far, need of the sampler, and what the host adds to
        their logits.

        Args:
            tail: the drafts of the chunk, if the host knows them.
        """
        sequence, num_drafts = chunk.sequence, chunk.num_drafts
        known, first_row = sequence.token_ids, rows.row_start[-1] - 1 - num_drafts
        changes.stages |= resident.stages
        if chunk.samples:
            rows.special += [(first_row + i, resident) for i in range(1 + num_drafts)]
        num_unknown = chunk.end - num_drafts - len(known)
        for row in range(1 + num_drafts):
            if chunk.samples:
                guessed = tail[:row]
                adjustment = sequence.logit_adjustments.of_row(
                    known, guessed, num_unknown + row - len(guessed)
                )
                changes.bias_ids += adjustment.token_ids
                changes.biases += adjustment.biases
                if sequence.beam_of is not None:
                    changes.add_bans(first_row + row, adjustment, self._vocab_size)
            rows.bias_starts.append(len(changes.bias_ids))

    def _write_rows(self, rows: _StepRows, num_chunks: int, host: _Ints, changes: _Changes) -> None:
        """Lay a step's arrays out in `host`, as if it had so many chunks."""
        num_tokens, num_rows = len(rows.tokens), rows.row_start[-1]
        num_spare = num_chunks - len(rows.slots)
        arrays: dict[str, list[int]] = {
            "header": [len(rows.slots), self._ring_index, num_tokens, num_rows],
            "slots": rows.slots,
            "sample_slots": rows.sample_slots,
            "starts": rows.starts,
            "query_start": [0, *accumulate(rows.lengths)] + [num_tokens] * num_spare,
            "row_start": rows.row_start,
            "given": [-1] * num_rows,
            "bias_starts": rows.bias_starts,
            "tokens": rows.tokens,
        }
        if rows.scored:
            changes.stages |= SamplerStages.TOP_LOGPROBS
        if changes.stages & (SamplerStages.MASKS | SamplerStages.TOP_LOGPROBS):
            masks, top_logprobs = [-1] * num_rows, [-1] * num_rows
            num_grammars = 0
            for row, resident in rows.special:
                if resident.sequence.grammar is not None:
                    masks[row] = self._num_slots + num_grammars
                    num_grammars += 1
                elif resident.stages & SamplerStages.MASKS:
                    masks[row] = resident.slot
                if resident.stages & SamplerStages.TOP_LOGPROBS:
                    top_logprobs[row] = resident.sequence.num_candidates or 0
            for row, chunk in rows.scored:
                params, scores = chunk.sequence.request.params, slice(row, row + chunk.num_scores)
                arrays["given"][scores] = chunk.scored_ids
                top_logprobs[scores] = [params.num_prompt_logprobs or 0] * chunk.num_scores
            arrays |= {"mask_rows": masks, "num_top_logprobs": top_logprobs}
        for name, values in arrays.items():
            first, _ = self._offsets[name]
            host[first : first + len(values)] = values

    def _admit(self, sequence: Sequence, changes: _Changes) -> _Resident:
        """Give a sequence a slot, and the device what it must know of it."""
        former = self._residents.pop(sequence.request_id, None)
        if former is not None:
            self._free.append(former.slot)
        if not self._free:
            # Those that ended or lost their blocks. The running ones are never more than the slots
            # and this one is not among them yet, so some are found.
            for request_id, resident in list(self._residents.items()):
                if resident.is_stale:
                    del self._residents[request_id]
                    self._free.append(resident.slot)
        params = sequence.request.params
        stages = SamplerStages.of(sequence)
        resident = _Resident(
            sequence,
            sequence.generation,
            self._free.pop(),
            stages,
            is_plain=stages is SamplerStages.NONE and sequence.logit_adjustments.is_noop,
        )
        self._residents[sequence.request_id] = resident
        changes.slots.append(resident.slot)
        changes.row_params += _row_params(sequence, resident.slot)
        if self.state.history is not None:
            length = self.state.history.shape[1]
            known = sequence.token_ids[:length]
            first = resident.slot * length
            changes.history_places += range(first, first + len(known))
            changes.history += known
        if params.has_penalties:
            self._count(sequence, resident.slot)
        if params.allowed_token_ids:
            mask = allowed_mask(params.allowed_token_ids, self._vocab_size)
            self.masks[resident.slot].copy_(torch.from_numpy(mask))
        return resident

    def _count(self, sequence: Sequence, slot: int) -> None:
        """Tell the sampler what stands in a prompt and in the output so far."""
        self.counts[slot].zero_()
        self.prompt[slot].zero_()
        ids = torch.tensor(sequence.token_ids, device=self._device)
        slots = torch.full((len(ids),), slot, dtype=torch.int32, device=self._device)
        first = sequence.num_prompt_tokens
        sampling.mark_prompt_tokens(slots[:first], ids[:first], self.prompt, self._vocab_size)
        sampling.count_output_tokens(slots[first:], ids[first:], self.counts)


@dataclass(slots=True)
class _StepRows:
    """The arrays of a step while it is written (see `StepLayout`).

    Attributes:
        slots, sample_slots, starts, tokens, row_start, bias_starts: as they are sent.
        lengths: tokens of each chunk.
        special: rows that need more of the sampler than logits and a temperature.
        scored: the first row of each chunk that scores tokens of its prompt.
    """

    slots: list[int] = field(default_factory=list)
    sample_slots: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    row_start: list[int] = field(default_factory=lambda: [0])
    bias_starts: list[int] = field(default_factory=lambda: [0])
    special: list[tuple[int, _Resident]] = field(default_factory=list)
    scored: list[tuple[int, Chunk]] = field(default_factory=list)

    def add_scores(self, chunk: Chunk, num_biases: int) -> int:
        """Add the rows of a chunk's scores; the row after them."""
        first_row = self.row_start[-1]
        self.scored.append((first_row, chunk))
        self.bias_starts += [num_biases] * chunk.num_scores
        return first_row + chunk.num_scores


@dataclass(slots=True)
class _Changes:
    """What the device does not know yet of a step, as flat lists of int32.

    Attributes:
        places, blocks: entries of block tables.
        slots, row_params: of sequences that are new.
        bias_ids, biases: of the step's rows.
        history_places, history: tokens of sequences that are new.
        ban_rows, ban_ids: of the step's rows that are beams'.
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
        """All of them, in the order in which they are sent."""
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
        # Beams do without what adds to logits: whatever is said bans a token.
        banned = [token_id for token_id in adjustment.token_ids if token_id < vocab_size]
        self.ban_rows += [row] * len(banned)
        self.ban_ids += banned

    def add_blocks(self, resident: _Resident, table_width: int) -> None:
        blocks = resident.sequence.blocks
        first = resident.slot * table_width
        self.places += range(first + resident.num_blocks, first + len(blocks))
        self.blocks += blocks[resident.num_blocks :]
        resident.num_blocks = len(blocks)
        if len(blocks) < table_width:  # what follows is another sequence's
            self.places.append(first + len(blocks))
            self.blocks.append(END_OF_TABLE)


def allowed_mask(token_ids: Iterable[int], vocab_size: int) -> _Ints:
    """[prompt_words(vocab_size)] bits of the tokens that may be chosen."""
    known = np.array([token_id for token_id in token_ids if token_id < vocab_size], np.int64)
    mask = np.zeros(sampling.prompt_words(vocab_size), np.uint32)
    np.bitwise_or.at(mask, known // 32, np.uint32(1) << (known % 32).astype(np.uint32))
    return mask.view(np.int32)


def _row_params(sequence: Sequence, slot: int) -> list[int]:
    """How to choose a sequence's tokens, as int32 words of `ops.sampling.ROW_PARAMS`."""
    params = sequence.request.params
    row = np.zeros(1, sampling.ROW_PARAMS)
    row["seed"] = sequence.seed
    row["temperature"] = params.effective_temperature
    for name in _ROW_OPTIONS:
        row[name] = getattr(params, name)
    row["slot"] = slot if params.has_penalties else -1
    words: list[int] = row.view(np.int32).tolist()
    return words
