"""The running batch on a GPU: which sequence has which slot, and what the device must be told.

The device keeps of each running sequence its block table, its wishes and its last token. A step is
sent as one copy: what it computes, and what changed since the last one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight.batch import Batch
from inflight.sequence import Sequence
from inflight_kernels import batch_state, cache, sampling
from inflight_kernels.batch_state import FROM_DEVICE, BatchState, Step, StepLayout

RING = 3
"""Steps whose host memory is in use at a time: one computes, one is read, one is written."""

# What changes in a step goes along with it as far as there is room: 1 MiB, which only a crowd of
# long prompts, found in the prefix cache, exceeds.
_UPDATE_WORDS = 1 << 18

_WISH_WORDS = sampling.WISH.itemsize // 4
_Ints = npt.NDArray[np.int32]


@dataclass(slots=True)
class _Resident:
    """A sequence that has a slot, and how much of its block table the device has."""

    sequence: Sequence
    generation: int
    slot: int
    has_filters: bool  # top_k, top_p or min_p cut what is drawn from
    has_penalties: bool
    num_blocks: int = 0

    @property
    def is_gone(self) -> bool:
        return self.generation != self.sequence.generation


@dataclass(frozen=True, slots=True)
class Sent:
    """A step that is on its way to the device.

    Attributes:
        num_chunks, num_tokens, max_q_len: of the step.
        ring_index: where in the ring its results will be.
        has_filters, has_penalties: whether a chunk's choice needs them.
        bans: [m] int32 on the device, tokens that chunks may not choose (see `StepLayout`); None if
            each may choose all.
    """

    num_chunks: int
    num_tokens: int
    max_q_len: int
    ring_index: int
    has_filters: bool
    has_penalties: bool
    bans: Tensor | None


class DeviceBatch:
    """Slots of sequences, and the memory through which steps go to the device and back.

    Args:
        max_num_seqs: sequences at once.
        max_batch_tokens: tokens in a step.
        table_width: blocks of the longest sequence.
        vocab_size: of the model.
        device: the GPU.

    Attributes:
        step, state: what kernels read (see `inflight_kernels.batch_state`).
        counts, prompt: of `sampling.sample`, a row per slot.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_batch_tokens: int,
        table_width: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._layout = StepLayout(max_num_seqs, max_batch_tokens, _UPDATE_WORDS)
        self._device = device
        self._vocab_size = vocab_size
        self.step = Step(self._layout, device)
        self.state = BatchState(self._layout, max_num_seqs, table_width, RING, device)
        words = sampling.prompt_words(vocab_size)
        self.counts = torch.zeros(max_num_seqs, vocab_size, dtype=torch.int16, device=device)
        self.prompt = torch.zeros(max_num_seqs, words, dtype=torch.int32, device=device)
        self._pinned = torch.zeros(
            RING, self._layout.size, dtype=torch.int32, pin_memory=torch.cuda.is_available()
        )
        self._host: list[_Ints] = [buffer.numpy() for buffer in self._pinned]
        self._results: _Ints = self.state.results.numpy()
        self._offsets = self._layout.offsets
        self._residents: dict[int, _Resident] = {}
        self._free = list(range(max_num_seqs))
        self._ring_index = 0

    def send(self, batch: Batch, num_rows: int, kv_cache: Tensor) -> Sent:
        """Bring a batch to the device, on the current stream: its copies, its diffs, its arrays.

        Args:
            batch: at least one chunk.
            num_rows: its chunks and, if more, rows that fill up a CUDA graph.
            kv_cache: [..., num_blocks, block_size, G, D].
        """
        self._ring_index = (self._ring_index + 1) % RING
        host = self._host[self._ring_index]
        changes = _Changes()
        end = self._write_step(batch, num_rows, host, changes)
        views: list[Tensor] = []
        for values in (changes.places, changes.blocks, changes.slots, changes.wishes, changes.bans):
            view = slice(end, end + len(values))
            if view.stop <= len(host):
                host[view] = values
                end = view.stop
                views.append(self.step.buffer[view])
            else:  # a copy of its own, for which the host waits
                views.append(torch.tensor(values, dtype=torch.int32, device=self._device))
        pinned = self._pinned[self._ring_index]
        self.step.buffer[:end].copy_(pinned[:end], non_blocking=True)
        places, blocks, slots, wishes, bans = views
        batch_state.write_tables(places, blocks, self.state.tables)
        batch_state.write_wishes(slots, wishes.view(-1, _WISH_WORDS), self.state.wishes)
        for first in range(0, len(batch.copies), cache.MAX_PAIRS):
            pairs = batch.copies[first : first + cache.MAX_PAIRS]
            sources, targets = torch.tensor(pairs, device=self._device).t().contiguous()
            cache.copy_blocks(kv_cache, sources, targets)
        lengths = [chunk.length for chunk in batch.chunks]
        return Sent(
            len(lengths),
            sum(lengths),
            max(lengths),
            self._ring_index,
            changes.has_filters,
            changes.has_penalties,
            bans if len(bans) else None,
        )

    def results(self, sent: Sent) -> tuple[list[int], list[float], list[int]]:
        """Tokens, log probabilities and statuses of a step that has ended, one per chunk."""
        tokens, logprobs, statuses = self._results[sent.ring_index, :, : sent.num_chunks]
        return tokens.tolist(), logprobs.view(np.float32).tolist(), statuses.tolist()

    def _write_step(self, batch: Batch, num_rows: int, host: _Ints, changes: _Changes) -> int:
        """Write a step's arrays. Returns where in `host` its tokens end."""
        slots: list[int] = []
        sample_slots: list[int] = []
        seq_lens: list[int] = []
        lengths: list[int] = []
        tokens: list[int] = []
        ban_starts = [0]
        width = self.state.tables.shape[1]
        for chunk in batch.chunks:
            sequence = chunk.sequence
            resident = self._residents.get(sequence.request_id)
            if resident is None or resident.is_gone or resident.sequence is not sequence:
                resident = self._admit(sequence, changes)
            if len(sequence.blocks) > resident.num_blocks:
                changes.add_blocks(resident, width)
            changes.has_filters |= resident.has_filters
            changes.has_penalties |= resident.has_penalties
            slots.append(resident.slot)
            sample_slots.append(resident.slot if chunk.samples else -1)
            seq_lens.append(chunk.end)
            lengths.append(chunk.length)
            known = sequence.token_ids
            if chunk.start < len(known):
                tokens += known[chunk.start : chunk.end]
            else:
                tokens.append(FROM_DEVICE)
            if chunk.samples:
                changes.bans += sequence.banned_tokens(chunk.end - sequence.num_prompt_tokens)
            ban_starts.append(len(changes.bans))
        spare = num_rows - len(slots)
        arrays: dict[str, list[int]] = {
            "header": [len(slots), self._ring_index],
            "slots": slots,
            "sample_slots": sample_slots,
            "seq_lens": seq_lens + [0] * spare,
            "query_start": [0, *accumulate(lengths)] + [len(tokens)] * spare,
            "ban_starts": ban_starts + ban_starts[-1:] * spare,
            "tokens": tokens,
        }
        for name, values in arrays.items():
            first, _ = self._offsets[name]
            host[first : first + len(values)] = values
        return self._offsets["tokens"][0] + len(tokens)

    def _admit(self, sequence: Sequence, changes: _Changes) -> _Resident:
        """Give a sequence a slot, and the device what it must know of it."""
        former = self._residents.pop(sequence.request_id, None)
        if former is not None:
            self._free.append(former.slot)
        if not self._free:
            # Those that ended or lost their blocks. The running ones are never more than the slots
            # and this one is not among them yet, so some are found.
            for request_id, resident in list(self._residents.items()):
                if resident.is_gone:
                    del self._residents[request_id]
                    self._free.append(resident.slot)
        params = sequence.request.params
        resident = _Resident(
            sequence,
            sequence.generation,
            self._free.pop(),
            has_filters=params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0,
            has_penalties=params.has_penalties,
        )
        self._residents[sequence.request_id] = resident
        changes.slots.append(resident.slot)
        changes.wishes += _wish(sequence, resident.slot)
        if params.has_penalties:
            self._count(sequence, resident.slot)
        return resident

    def _count(self, sequence: Sequence, slot: int) -> None:
        """Tell the sampler what stands in a prompt and in the output so far."""
        self.counts[slot].zero_()
        self.prompt[slot].zero_()
        ids = torch.tensor(sequence.token_ids, device=self._device)
        slots = torch.full((len(ids),), slot, dtype=torch.int32, device=self._device)
        first = sequence.num_prompt_tokens
        sampling.note_prompt(slots[:first], ids[:first], self.prompt, self._vocab_size)
        sampling.note_output(slots[first:], ids[first:], self.counts)


@dataclass(slots=True)
class _Changes:
    """What the device does not know yet of a step, as flat lists of int32.

    Attributes:
        places, blocks: entries of block tables.
        slots, wishes: of sequences that are new.
        bans: tokens that the step's chunks may not choose.
        has_filters, has_penalties: see `Sent`.
    """

    places: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    wishes: list[int] = field(default_factory=list)
    bans: list[int] = field(default_factory=list)
    has_filters: bool = False
    has_penalties: bool = False

    def add_blocks(self, resident: _Resident, table_width: int) -> None:
        blocks = resident.sequence.blocks
        first = resident.slot * table_width
        self.places += range(first + resident.num_blocks, first + len(blocks))
        self.blocks += blocks[resident.num_blocks :]
        resident.num_blocks = len(blocks)


def _wish(sequence: Sequence, slot: int) -> list[int]:
    """How to choose a sequence's tokens, as int32 words of `sampling.WISH`."""
    params = sequence.request.params
    wish = np.zeros(1, sampling.WISH)
    wish["seed"] = sequence.seed
    wish["temperature"] = params.effective_temperature
    wish["top_k"] = params.top_k
    wish["top_p"] = params.top_p
    wish["min_p"] = params.min_p
    wish["repetition"] = params.repetition_penalty
    wish["presence"] = params.presence_penalty
    wish["frequency"] = params.frequency_penalty
    wish["slot"] = slot if params.has_penalties else -1
    words: list[int] = wish.view(np.int32).tolist()
    return words
