"""Drafts by a smaller model of the same vocabulary (speculative decoding, arXiv:2211.17192).

It drafts token by token and samples like the target: with the same row_params, and the random
number of the same position. It has its own KV cache.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from inflight.checkpoint.locate import Checkpoint
from inflight.core.batch import Batch, BatchArrays, Chunk, StepOutput
from inflight.core.sequence import Sequence
from inflight.core.step_size import StepSize
from inflight.errors import ConfigError
from inflight.execution.drafters.draft_inputs import DraftInputs
from inflight.execution.drafters.drafter import DeviceDrafter, DeviceTarget, Target
from inflight.execution.drafters.drafter_spec import DrafterSpec, DraftMethod
from inflight.execution.sampler import LogitsRow, sample
from inflight.kv.cache import KVCache
from inflight.models.decoder_cpu import Decoder, TableInputs
from inflight.models.registry import read_spec
from inflight.models.spec import ModelSpec
from inflight.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from inflight.models.decoder_cuda import Decoder as DeviceDecoder
    from inflight.models.layers.attention import ForwardInputs

_NO_ROWS = torch.empty(0, dtype=torch.int64)


class ModelDrafter:
    """Drafts with a model, or with its first layers.

    Args:
        model: the draft model.
        cache: its KV cache.
        num_layers: draft with the target's first `num_layers` layers, in the target's cache; None
            for a separate model.
    """

    def __init__(self, model: Decoder, cache: KVCache, num_layers: int | None = None) -> None:
        self.caches = [cache] if num_layers is None else []
        self.from_outputs: set[int] = set()
        self._model = model
        self._cache = cache
        self._num_layers = num_layers

    @classmethod
    def load(cls, source: DrafterSpec, target: Target) -> ModelDrafter:
        """Load a separate draft model.

        Raises:
            ConfigError: the weights are corrupt or do not match the settings.
        """
        own, checkpoint = source.model, source.checkpoint
        assert own is not None and checkpoint is not None
        model = Decoder(
            checkpoint,
            own,
            target.dtype,
            target.max_len,
            lambda what, fraction: target.progress("drafter", fraction),
            kv_cache_dtype=target.config.kv_cache_dtype,
        )
        layout = own.kv_layout(target.config.kv_dtype)
        return cls(model, KVCache(layout, target.num_blocks, target.config.block_size))

    def propose(self, chunks: list[Chunk]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in chunks]
        for depth in range(max((chunk.num_drafts for chunk in chunks), default=0)):
            wanted = [i for i, chunk in enumerate(chunks) if chunk.num_drafts > depth]
            active = [chunks[i] for i in wanted]
            tokens = [
                drafts[i][-1] if depth else chunk.sequence.token_ids[chunk.start]
                for i, chunk in zip(wanted, active, strict=True)
            ]
            rows = DraftInputs.one_each(active, tokens, depth, self._cache, self._model.dtype)
            logits = self._model.forward(
                rows.token_ids,
                rows.positions,
                [TableInputs(rows.slot_mapping, rows.plan)],
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
            arrays.tables[0].block_tables,
            self._cache.block_size,
            self._model.dtype,
        )
        tables = [TableInputs(rows.slot_mapping, rows.plan)]
        self._model.forward(rows.token_ids, rows.positions, tables, _NO_ROWS, self._cache)

    def forget(self, sequence: Sequence) -> None:
        """Nothing to drop: its state is in the blocks."""


class DeviceModelPasses:
    """Passes of a model on a GPU (see `device_passes.PassModel`).

    Args:
        target: the target model.
        spec: of a separate draft model; None to draft with the target itself.
        num_layers: use only so many first layers; None for all.
    """

    behind = 0
    has_update = False

    def __init__(
        self, target: DeviceTarget, spec: DrafterSpec | None, num_layers: int | None = None
    ) -> None:
        self.caches: list[KVCache] = []
        self._target = target
        self._own = None if spec is None else spec.model
        self._num_layers = num_layers
        self._model: DeviceDecoder = target.model
        self._cache: KVCache | None = None
        if spec is not None:
            from inflight.models.decoder_cuda import Decoder as DeviceDecoder

            assert spec.model is not None and spec.checkpoint is not None
            self._model = DeviceDecoder(
                spec.checkpoint,
                spec.model,
                # The setting is the target's; a draft model runs as its checkpoint stores it.
                replace(target.settings, quantization="auto"),
                lambda what, fraction: target.progress("drafter", fraction),
            )

    def allocate(self, cache: KVCache, num_blocks: int) -> None:
        target = self._target
        self._cache = cache
        if self._own is not None:
            with_scratch = num_blocks + target.config.max_num_seqs
            layout = self._own.kv_layout(target.settings.kv_dtype)
            size, device = target.config.block_size, target.settings.device
            self._cache = KVCache(layout, with_scratch, size, device)
            self.caches = [self._cache]

    def forward(self, size: StepSize) -> None:
        if self._own is not None:
            assert self._cache is not None
            self._model.forward(self._target.rows, replace(size, num_rows=0), self._cache)

    def update(self, size: StepSize) -> None:
        """Nothing to do: `forward` computed everything."""

    def compute(
        self, inputs: ForwardInputs, sources: Tensor, num_rows: int, is_first: bool
    ) -> Tensor:
        assert self._cache is not None
        self._model.forward(inputs, StepSize.decode(num_rows), self._cache, self._num_layers)
        return self._model.logits[:num_rows]


def _load_on_device(spec: DrafterSpec, target: DeviceTarget) -> DeviceDrafter:
    from inflight.execution.drafters.device_passes import PassDrafter

    return PassDrafter(DeviceModelPasses(target, spec), target)


def _read(spec: DrafterSpec, checkpoint: Checkpoint, model: ModelSpec) -> DrafterSpec:
    own = spec.checkpoint
    assert own is not None
    smaller = read_spec(own)
    if smaller.vocab_size != model.vocab_size:
        raise ConfigError(
            f"{own.path} has a vocabulary of {smaller.vocab_size} tokens; a draft model must have "
            f"the model's, of {model.vocab_size}"
        )
    _check_tokenizers(checkpoint, own)
    return replace(spec, model=smaller)


def _check_tokenizers(checkpoint: Checkpoint, own: Checkpoint) -> None:
    """Equal ids must have equal texts, except special tokens, which models rename."""
    ours, theirs = Tokenizer.load_if_present(checkpoint), Tokenizer.load_if_present(own)
    if ours is None or theirs is None:
        return
    special = set(ours.special_ids) | set(theirs.special_ids)
    texts = {id_: text for text, id_ in theirs.vocabulary().items() if id_ not in special}
    for text, id_ in ours.vocabulary().items():
        if id_ in texts and texts[id_] != text:
            raise ConfigError(
                f"{own.path} has a different tokenizer: its token {id_} is {texts[id_]!r}, and the "
                f"model's is {text!r}"
            )


METHOD = DraftMethod(
    load=ModelDrafter.load,
    load_on_device=_load_on_device,
    read=_read,
    requires_model=True,
    writes_kv=True,
)
