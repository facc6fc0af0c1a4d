"""Drafts by a cheaper model: a smaller one of the same vocabulary, or the model's own first layers.

A model drafts token by token and chooses as the target does: with the same row parameters, and the
    random number of the same position. A smaller one (speculative decoding, arXiv:2211.17192) keeps
    keys and
values of its own. The first layers of the target (self-speculation, arXiv:2309.08168) use the
target's: what they write at a draft's place is what the target writes there when it checks it.
"""

from __future__ import annotations

import torch

from inflight.core.batch import Batch, BatchArrays, Chunk, StepOutput
from inflight.core.sequence import Sequence
from inflight.execution.drafters import Target
from inflight.execution.drafters.draft_inputs import DraftInputs
from inflight.execution.drafters.drafter_spec import DrafterSpec
from inflight.execution.sampler import LogitsRow, sample
from inflight.kv.cache import KVCache
from inflight.models.decoder_cpu import Decoder

_NO_ROWS = torch.empty(0, dtype=torch.int64)


class ModelDrafter:
    """Drafts with a model, or with its first layers.

    Args:
        model: that drafts.
        cache: its keys and values.
        num_layers: the first so many, of the target itself, whose cache this is then; None for a
            model of its own.
    """

    def __init__(self, model: Decoder, cache: KVCache, num_layers: int | None = None) -> None:
        self.caches = [cache] if num_layers is None else []
        self._model = model
        self._cache = cache
        self._num_layers = num_layers

    @classmethod
    def load(cls, source: DrafterSpec, target: Target) -> ModelDrafter:
        """A smaller model.

        Raises:
            ConfigError: the weights are damaged or do not fit the settings.
        """
        own, checkpoint = source.model, source.checkpoint
        assert own is not None and checkpoint is not None
        model = Decoder(
            checkpoint,
            own,
            target.dtype,
            target.max_len,
            lambda what, fraction: target.progress("drafter", fraction),
        )
        config = target.config
        layout = own.kv_layout(config.dtype)
        return cls(model, KVCache(layout, target.num_blocks, config.block_size))

    def propose(self, chunks: list[Chunk]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in chunks]
        for depth in range(max((chunk.num_drafts for chunk in chunks), default=0)):
            wanted = [i for i, chunk in enumerate(chunks) if chunk.num_drafts > depth]
            active = [chunks[i] for i in wanted]
            tokens = [
                drafts[i][-1] if depth else chunk.sequence.token_ids[chunk.start]
                for i, chunk in zip(wanted, active, strict=True)
            ]
            rows = DraftInputs.one_each(active, tokens, depth, self._cache)
            logits = self._model.forward(
                rows.token_ids,
                rows.positions,
                rows.slot_mapping,
                rows.plan,
                torch.arange(len(active)),
                self._cache,
                self._num_layers,
            )
            asked = [
                LogitsRow(chunk.sequence, list(drafts[i]))
                for i, chunk in zip(wanted, active, strict=True)
            ]
            for i, token in zip(wanted, sample(logits, asked).token_ids, strict=True):
                drafts[i].append(token)
        return drafts

    def update(self, batch: Batch, arrays: BatchArrays, output: StepOutput) -> None:
        if not self.caches:
            return
        rows = DraftInputs.of(
            arrays.token_ids,
            arrays.positions,
            arrays.query_start,
            arrays.block_tables,
            self._cache.block_size,
            self._cache.dtype,
        )
        self._model.forward(
            rows.token_ids, rows.positions, rows.slot_mapping, rows.plan, _NO_ROWS, self._cache
        )

    def forget(self, sequence: Sequence) -> None:
        """All it keeps is in the blocks."""
