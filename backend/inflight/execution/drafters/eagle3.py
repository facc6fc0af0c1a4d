"""Drafts by a head that was trained for the model (EAGLE-3; see `models.eagle3`).

At each position the head sees the model's hidden states there and the token after it. So it
follows a step when that has chosen its tokens, one position behind, and then knows the first draft:
it needs one pass less than drafts. In the prefix cache the last position of a block was computed
with the token that followed it then; where another one does now, that one entry is a little off.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from inflight.core.batch import Batch, BatchArrays, Chunk, StepOutput
from inflight.core.sequence import Sequence
from inflight.execution.drafters import Target
from inflight.execution.drafters.draft_inputs import DraftInputs
from inflight.execution.drafters.drafter_spec import DrafterSpec
from inflight.execution.sampler import LogitsRow, sample
from inflight.kv.cache import KVCache
from inflight.models.decoder_cpu import Decoder
from inflight.models.eagle3 import Head


@dataclass(frozen=True, slots=True)
class _LastHidden:
    """What the head made of a sequence's last computed position.

    Attributes:
        generation: of the sequence then.
        position: that one.
        hidden: [hidden_size].
    """

    generation: int
    position: int
    hidden: Tensor


class Eagle3Drafter:
    """Drafts with an EAGLE-3 head.

    Args:
        model: the head.
        cache: its keys and values.
        target: the model that it drafts for, whose `features` it reads.
    """

    def __init__(self, model: Head, cache: KVCache, target: Decoder) -> None:
        self.caches = [cache]
        self._model = model
        self._cache = cache
        self._target = target
        self._last_hidden: dict[int, _LastHidden] = {}
        target.set_aux_layers(model.spec.aux_layers)

    @classmethod
    def load(cls, source: DrafterSpec, target: Target) -> Eagle3Drafter:
        """The head that settings name.

        Raises:
            ConfigError: the weights are damaged or do not fit the settings.
        """
        head, checkpoint = source.head, source.checkpoint
        assert head is not None and checkpoint is not None
        model = Head(
            checkpoint,
            head,
            target.model.weights,
            target.dtype,
            target.max_len,
            lambda what, fraction: target.progress("drafter", fraction),
        )
        config = target.config
        layout = head.layer.kv_layout(config.dtype)
        cache = KVCache(layout, target.num_blocks, config.block_size)
        return cls(model, cache, target.model)

    def propose(self, chunks: list[Chunk]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in chunks]
        hidden: dict[int, Tensor] = {}
        for i, chunk in enumerate(chunks):
            last = self._last_hidden.get(chunk.sequence.request_id)
            if last is not None and chunk.num_drafts:
                is_current = last.generation == chunk.generation
                if is_current and last.position == chunk.start - 1:
                    hidden[i] = last.hidden
        for depth in range(max((chunk.num_drafts for chunk in chunks), default=0)):
            wanted = [i for i in hidden if chunks[i].num_drafts > depth]
            if not wanted:
                break
            active = [chunks[i] for i in wanted]
            states = torch.stack([hidden[i] for i in wanted])
            if depth:
                tokens = [drafts[i][-1] for i in wanted]
                rows = DraftInputs.one_each(active, tokens, depth - 1, self._cache)
                states = self._run(rows, states)
                hidden |= zip(wanted, states, strict=True)
            asked = [
                LogitsRow(chunk.sequence, list(drafts[i]))
                for i, chunk in zip(wanted, active, strict=True)
            ]
            chosen = sample(self._model.logits(states), asked).token_ids
            for i, token in zip(wanted, chosen, strict=True):
                drafts[i].append(token)
        return drafts

    def update(self, batch: Batch, arrays: BatchArrays, output: StepOutput) -> None:
        """Compute the positions whose next token is known: all but those of wrong drafts."""
        chunks: list[int] = []
        kept: list[int] = []
        lengths: list[int] = []
        tokens: list[int] = []
        for index, chunk in enumerate(batch.chunks):
            if index in output.errors:
                continue
            if chunk.samples:
                after = output.token_ids[index]
            else:
                after = [chunk.sequence.token_ids[chunk.end]]
            first = int(arrays.query_start[index])
            last_known = first + chunk.length - chunk.num_drafts - 1
            followers = [*arrays.token_ids[first + 1 : last_known + 1].tolist(), *after]
            chunks.append(index)
            kept += range(first, first + len(followers))
            lengths.append(len(followers))
            tokens += followers
        features = self._target.features
        if not chunks or features is None:
            return
        rows = DraftInputs.of(
            np.array(tokens, np.int64),
            arrays.positions[kept],
            np.array([0, *accumulate(lengths)]),
            arrays.block_tables[chunks],
            self._cache.block_size,
            self._cache.dtype,
        )
        states = self._run(rows, self._model.fuse(features[kept]))
        for index, end in zip(chunks, accumulate(lengths), strict=True):
            chunk, position = batch.chunks[index], int(rows.positions[end - 1])
            last = _LastHidden(chunk.generation, position, states[end - 1].clone())
            self._last_hidden[chunk.sequence.request_id] = last

    def forget(self, sequence: Sequence) -> None:
        self._last_hidden.pop(sequence.request_id, None)

    def _run(self, rows: DraftInputs, hidden: Tensor) -> Tensor:
        return self._model.forward(
            rows.token_ids, hidden, rows.positions, rows.slot_mapping, rows.plan, self._cache
        )
