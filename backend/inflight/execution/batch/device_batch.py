"""The running batch on a GPU: slots of sequences, and the diffs sent to the device.

The device keeps each running sequence's block table, sampling parameters and last token. A step is
uploaded as one copy: its chunks, and what changed since the last step.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight.core.batch import Batch, Chunk
from inflight.core.kernel_blocks import KernelBlocks
from inflight.core.sequence import Sequence
from inflight.core.step_size import StepSize
from inflight.execution.batch.grammar_masks import GrammarMasks
from inflight.execution.batch.step_upload import (
    Changes,
    Resident,
    SamplerStages,
    StepRows,
    row_params,
)
from inflight_kernels.ops import batch_state, cache, sampling
from inflight_kernels.ops.batch_state import (
    FROM_DEVICE,
    NOT_DRAFTED,
    BatchState,
    StateSizes,
    Step,
    StepLayout,
)

RING = 3
"""Host buffers of steps in use at a time: one executing, one being read, one being written."""

# Diffs travel in the step's own copy up to 1 MiB, which only many long prompts found in the prefix
# cache exceed.
_UPDATE_WORDS = 1 << 18

END_OF_TABLE = -1
"""Terminates a block table, for kernels that write ahead of the host (drafting)."""

_ROW_PARAMS_WORDS = sampling.ROW_PARAMS.itemsize // 4
_Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SubmittedStep:
    """A step submitted to the device.

    Attributes:
        size: of the step.
        row_start: [num_chunks + 1]; chunk i has rows of logits row_start[i]:row_start[i + 1], the
            first num_scores of them for its scores.
        num_drafts: maximum drafts of its sequences in the next step.
        ring_index: index of its results in the ring.
        stages: optional sampler stages that any of its rows needs.
        logit_bias: of its rows; None if there is none.
        bans: ([b], [b]) int64 on the device: rows of beams and the tokens banned there, which are
            not candidates either. None if there are none.
    """

    size: StepSize
    row_start: list[int]
    ring_index: int
    stages: SamplerStages
    num_drafts: int
    logit_bias: sampling.LogitBias | None
    bans: tuple[Tensor, Tensor] | None

    @property
    def is_plain(self) -> bool:
        """Whether sampling has no optional stages, and no adjustments."""
        return self.stages is SamplerStages.NONE and self.logit_bias is None and self.bans is None


class SampledTokens(NamedTuple):
    """The sampled tokens of one chunk: the accepted drafts, and the token after them.

    Empty if the chunk does not sample.
    """

    token_ids: list[int]
    logprobs: list[float]
    status: int  # of the last one
    num_proposed: int  # drafts that the device had for the step; NOT_DRAFTED if it drafted none
    would_accept: bool  # the last token is its first draft without a row


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of a batch's steps.

    Attributes:
        max_num_seqs: maximum running sequences.
        max_num_batched_tokens: maximum tokens in a step.
        table_width: blocks of the longest sequence.
        max_rows: rows of logits in a step: one for each sequence, draft and score.
        max_drafts: of a sequence.
        history_length: tokens per sequence kept on the device; 0 for none.
        num_tables: block tables of a sequence.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    table_width: int
    max_rows: int
    max_drafts: int = 0
    history_length: int = 0
    num_tables: int = 1


class DeviceBatch:
    """Slots of sequences, and the buffers for uploading steps and downloading results.

    Args:
        limits: of its steps.
        vocab_size: of the model.
        device: the GPU.

    Attributes:
        step, state: inputs of the kernels (see `inflight_kernels.ops.batch_state`).
        counts, prompt, masks: see `ops.sampling.PenaltyState` and `TokenMasks`; a row per slot.
        kernel_blocks: by block table, how its blocks are split; set once the pool's size is known.
    """

    def __init__(self, limits: BatchLimits, vocab_size: int, device: torch.device) -> None:
        self._layout = StepLayout(limits.max_rows, limits.max_num_batched_tokens, _UPDATE_WORDS)
        self._device = device
        self._vocab_size = vocab_size
        self.step = Step(self._layout, device)
        self._num_slots = max_num_seqs = limits.max_num_seqs
        sizes = StateSizes(
            max_num_seqs,
            limits.table_width,
            RING,
            limits.max_drafts,
            limits.history_length,
            limits.num_tables,
        )
        self.state = BatchState(self._layout, sizes, device)
        self.kernel_blocks = (KernelBlocks(),) * limits.num_tables
        words = sampling.prompt_words(vocab_size)
        self.counts = torch.zeros(max_num_seqs, vocab_size, dtype=torch.int16, device=device)
        self.prompt = torch.zeros(max_num_seqs, words, dtype=torch.int32, device=device)
        # First one per slot, for allowed_token_ids; then one per row of a step, for grammars.
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
        self._nothing = self.step.buffer[:0]
        self._residents: dict[int, Resident] = {}
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
        """Submit a batch to the device, on the current stream: block copies, diffs, arrays.

        Args:
            batch: at least one chunk.
            size: of the batch.
            kv_caches: [..., num_blocks, block_size, G, D] each.
            bucket: size of the CUDA graph that will run it; None for none.
            drafts: for each chunk num_drafts tokens, or none if they are on the device. None if all
                are.
        """
        self._ring_index = (self._ring_index + 1) % RING
        host = self._host[self._ring_index]
        changes = Changes()
        num_chunks = size.num_chunks if bucket is None else bucket.num_chunks
        end, row_start = self._write_step(batch, num_chunks, host, changes, drafts)
        end, views = self._write_changes(changes, host, end)
        pinned = self._pinned[self._ring_index]
        batch_state.upload(pinned[:end], self.step.buffer[:end], pdl=True)
        places, blocks, slots, row_params, bias_ids, biases, history_places, history = views[:8]
        ban_rows, ban_ids = views[8:]
        if changes.places:
            batch_state.write_tables(places, blocks, self.state.all_tables)
        if changes.slots:
            batch_state.write_row_params(
                slots, row_params.view(-1, _ROW_PARAMS_WORDS), self.state.row_params
            )
        if self.state.history is not None and changes.history:
            batch_state.write_tables(history_places, history, self.state.history)
        for first in range(0, len(batch.copies), cache.MAX_PAIRS):
            pairs = batch.copies[first : first + cache.MAX_PAIRS]
            sources, targets = torch.tensor(pairs, device=self._device).t().contiguous()
            for kv_cache in kv_caches:
                cache.copy_blocks(kv_cache, sources, targets)
        logit_bias = None
        if changes.bias_ids:
            starts = self.step.bias_starts[: size.num_rows + 1]
            logit_bias = sampling.LogitBias(starts, bias_ids, biases.view(torch.float32))
        return SubmittedStep(
            size,
            row_start,
            self._ring_index,
            changes.stages,
            changes.num_drafts,
            logit_bias,
            (ban_rows.long(), ban_ids.long()) if changes.ban_rows else None,
        )

    def _write_changes(self, changes: Changes, host: _Ints, end: int) -> tuple[int, list[Tensor]]:
        """Write a step's diffs behind its arrays; returns their end, and each of them on the
        device."""
        views: list[Tensor] = []
        for values in changes.arrays():
            if not values:  # most of them, in most steps; a slice is half of a launch
                views.append(self._nothing)
                continue
            view = slice(end, end + len(values))
            if view.stop <= len(host):
                host[view] = values
                end = view.stop
                views.append(self.step.buffer[view])
            else:  # a separate, synchronous copy
                views.append(torch.tensor(values, dtype=torch.int32, device=self._device))
        return end, views

    def clear(self) -> None:
        """Submit a step without chunks, which reads and writes no block."""
        self.step.buffer.zero_()
        for table in self.state.by_table:
            table.slot_mapping.fill_(-1)

    def send_dummies(
        self, count: int, num_tokens: int, start: int, *, has_drafts: bool = True
    ) -> None:
        """Submit a step for timing, in which nothing is sampled and all blocks are block 0.

        Args:
            count: sequences.
            num_tokens: of each, as many rows.
            start: position of the first of them.
            has_drafts: whether those after the first are drafts that there are, else missing ones.
        """
        total = count * num_tokens
        ends = [*range(0, total, num_tokens), total]
        arrays = {
            "header": [count, 0, total, total],
            "slots": [*range(count)],
            "sample_slots": [-1] * count,
            "starts": [start] * count,
            "query_start": ends + [total] * (self._layout.max_rows - count),  # no other chunks
            "row_start": ends,
            "given": [-1] * total,
            "tokens": [0, *[0 if has_drafts else FROM_DEVICE] * (num_tokens - 1)] * count,
        }
        host = torch.zeros(self._layout.size, dtype=torch.int32)
        for name, values in arrays.items():
            first, _ = self._offsets[name]
            host[first : first + len(values)] = torch.tensor(values, dtype=torch.int32)
        self.step.buffer.copy_(host)

    def penalties(self, num_rows: int) -> sampling.PenaltyState:
        """Token statistics for the penalties of a step's first rows."""
        state = self.state
        tails = sampling.DraftTails(
            state.token_ids, state.tail_starts[:num_rows], state.tail_lengths[:num_rows]
        )
        return sampling.PenaltyState(self.counts, self.prompt, tails)

    def send_masks(self, batch: Batch, masks: GrammarMasks) -> None:
        """Upload the grammars' masks, after `send` and before sampling."""
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
            if words is None:  # its grammar failed, and so does the sequence
                continue
            host[place] = words
            allowed = chunk.sequence.request.params.allowed_token_ids
            if allowed:
                host[place] &= allowed_mask(allowed, self._vocab_size)
        self._grammar_masks[: len(rows)].copy_(pinned, non_blocking=True)

    def results(self, batch: Batch, sent: SubmittedStep) -> list[SampledTokens]:
        """The sampled tokens of each chunk of a completed step."""
        tokens, logprobs, statuses, counts, proposed, following = self._results[sent.ring_index]
        num_rows, num_chunks = sent.size.num_rows, sent.size.num_chunks
        all_tokens = tokens[:num_rows].tolist()
        all_logprobs = logprobs[:num_rows].view(np.float32).tolist()
        all_statuses = statuses[:num_rows].tolist()
        all_proposed, all_following = [NOT_DRAFTED] * num_chunks, [0] * num_chunks
        if self.state.drafts.shape[1]:
            all_proposed = proposed[:num_chunks].tolist()
            all_following = following[:num_chunks].tolist()
        found = []
        places = zip(
            batch.chunks,
            sent.row_start,
            counts[:num_chunks].tolist(),
            all_proposed,
            all_following,
            strict=False,
        )
        for chunk, first_row, count, num_proposed, would_accept in places:
            first = first_row + chunk.num_scores
            end = first + count
            status = all_statuses[end - 1] if count else sampling.OK
            found.append(
                SampledTokens(
                    all_tokens[first:end],
                    all_logprobs[first:end],
                    status,
                    num_proposed if count else NOT_DRAFTED,
                    bool(would_accept and count),
                )
            )
        return found

    def _write_step(
        self,
        batch: Batch,
        num_chunks: int,
        host: _Ints,
        changes: Changes,
        drafts: Sequence_[list[int]] | None,
    ) -> tuple[int, list[int]]:
        """Write a step's arrays, padded to `num_chunks`.

        Returns:
            The end of its tokens in `host`, and row_start.
        """
        rows = StepRows()
        slots, sample_slots, starts = rows.slots, rows.sample_slots, rows.starts
        lengths, tokens = rows.lengths, rows.tokens
        row_start, bias_starts = rows.row_start, rows.bias_starts
        for index, chunk in enumerate(batch.chunks):
            sequence, num_drafts = chunk.sequence, chunk.num_drafts
            resident = self._residents.get(sequence.request_id)
            if resident is None or resident.is_stale or resident.sequence is not sequence:
                resident = self._admit(sequence, changes)
            if sequence.capacity > resident.capacity:
                self._add_blocks(resident, changes)
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
            if resident.is_plain:  # the common case; this loop is the host's time per step
                bias_starts += [len(changes.bias_ids)] * (1 + num_drafts)
            else:
                self._adjust_rows(resident, chunk, tail, rows, changes)
        self._write_rows(rows, num_chunks, host, changes)
        return self._offsets["tokens"][0] + len(tokens), row_start

    def _adjust_rows(
        self, resident: Resident, chunk: Chunk, tail: list[int], rows: StepRows, changes: Changes
    ) -> None:
        """Add the sampler stages and logit adjustments of a chunk's rows, the last ones so far.

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

    def _write_rows(self, rows: StepRows, num_chunks: int, host: _Ints, changes: Changes) -> None:
        """Write a step's arrays to `host`, padded to so many chunks."""
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

    def _admit(self, sequence: Sequence, changes: Changes) -> Resident:
        """Give a sequence a slot, and queue its per-slot data for upload."""
        former = self._residents.pop(sequence.request_id, None)
        if former is not None:
            self._free.append(former.slot)
        if not self._free:
            # Reclaim the slots of finished and preempted sequences. There are never more running
            # sequences than slots, and this one has none yet, so at least one is found.
            for request_id, resident in list(self._residents.items()):
                if resident.is_stale:
                    del self._residents[request_id]
                    self._free.append(resident.slot)
        params = sequence.request.params
        stages = SamplerStages.of(sequence)
        resident = Resident(
            sequence,
            sequence.generation,
            self._free.pop(),
            stages,
            is_plain=stages is SamplerStages.NONE and sequence.logit_adjustments.is_noop,
            num_blocks=[0] * len(self.kernel_blocks),
        )
        self._residents[sequence.request_id] = resident
        changes.slots.append(resident.slot)
        changes.row_params += row_params(sequence, resident.slot)
        if self.state.drafts.shape[1]:
            # The slot's former sequence may have left some.
            self.state.drafts[resident.slot].fill_(NOT_DRAFTED)
        if self.state.copies is not None:
            self.state.copies[resident.slot].fill_(-1)
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

    def _add_blocks(self, resident: Resident, changes: Changes) -> None:
        """Queue the new entries of a sequence's block tables for upload."""
        sequence, width = resident.sequence, self.state.tables.shape[1]
        for index, (table, split) in enumerate(
            zip(sequence.tables, self.kernel_blocks, strict=True)
        ):
            first = (index * self._num_slots + resident.slot) * width
            begin = resident.num_blocks[index] * split.count
            # The last block may reach beyond the longest sequence.
            new = split.ids(table[resident.num_blocks[index] :])[: width - begin]
            end = begin + len(new)
            changes.places += range(first + begin, first + end)
            changes.blocks += new
            resident.num_blocks[index] = len(table)
            if end < width:  # stale entries of an earlier sequence follow
                changes.places.append(first + end)
                changes.blocks.append(END_OF_TABLE)
        resident.capacity = sequence.capacity

    def _count(self, sequence: Sequence, slot: int) -> None:
        """Initialise a slot's token counts from the prompt and the output so far."""
        self.counts[slot].zero_()
        self.prompt[slot].zero_()
        ids = torch.tensor(sequence.token_ids, device=self._device)
        slots = torch.full((len(ids),), slot, dtype=torch.int32, device=self._device)
        first = sequence.num_prompt_tokens
        sampling.mark_prompt_tokens(slots[:first], ids[:first], self.prompt, self._vocab_size)
        sampling.count_output_tokens(slots[first:], ids[first:], self.counts)


def allowed_mask(token_ids: Iterable[int], vocab_size: int) -> _Ints:
    """[prompt_words(vocab_size)] bits of the allowed tokens."""
    known = np.array([token_id for token_id in token_ids if token_id < vocab_size], np.int64)
    mask = np.zeros(sampling.prompt_words(vocab_size), np.uint32)
    np.bitwise_or.at(mask, known // 32, np.uint32(1) << (known % 32).astype(np.uint32))
    return mask.view(np.int32)
