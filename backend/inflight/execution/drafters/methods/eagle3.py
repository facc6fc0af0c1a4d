"""EAGLE-3 drafter: a head trained for the model (see `models.eagle3`).

At each position the head takes the model's hidden states there and the token after it. So it runs
after a step has sampled, one position behind, and then has the first draft already: it needs one
pass less than drafts. In the prefix cache the last position of a block was computed with the token
that followed it then; if another one follows now, that one entry is slightly off.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from inflight.checkpoint.locate import Checkpoint
from inflight.core.batch import Batch, BatchArrays, Chunk, StepOutput
from inflight.core.sequence import Sequence
from inflight.core.step_size import StepSize
from inflight.execution.drafters.draft_inputs import DraftInputs
from inflight.execution.drafters.drafter import DeviceDrafter, DeviceTarget, Target
from inflight.execution.drafters.drafter_spec import DrafterSpec, DraftMethod
from inflight.execution.sampler import LogitsRow, sample
from inflight.kv.cache import KVCache
from inflight.models.decoder_cpu import Decoder
from inflight.models.eagle3 import Head
from inflight.models.eagle3_spec import Eagle3Spec as HeadSpec
from inflight.models.eagle3_spec import read_eagle3_spec
from inflight.models.spec import ModelSpec

if TYPE_CHECKING:
    from inflight.models.layers.attention import ForwardInputs


@dataclass(frozen=True, slots=True)
class Eagle3Spec(DrafterSpec):
    """A configured EAGLE-3 head.

    Attributes:
        head: its spec.
    """

    head: HeadSpec | None = None


@dataclass(frozen=True, slots=True)
class _LastHidden:
    """The head's hidden state at a sequence's last computed position.

    Attributes:
        generation: the sequence's, at that time.
        position: the position.
        hidden: [hidden_size].
    """

    generation: int
    position: int
    hidden: Tensor


class Eagle3Drafter:
    """Drafts with an EAGLE-3 head.

    Args:
        model: the head.
        cache: its KV cache.
        target: the target model, whose `features` it reads.
    """

    def __init__(self, model: Head, cache: KVCache, target: Decoder) -> None:
        self.caches = [cache]
        self.from_outputs: set[int] = set()
        self._model = model
        self._cache = cache
        self._target = target
        self._last_hidden: dict[int, _LastHidden] = {}
        target.set_aux_layers(model.spec.aux_layers)

    @classmethod
    def load(cls, source: DrafterSpec, target: Target) -> Eagle3Drafter:
        """Load the head named in the settings.

        Raises:
            ConfigError: the weights are corrupt or do not match the settings.
        """
        head, checkpoint = _head_of(source)
        model = Head(
            checkpoint,
            head,
            target.model.weights,
            target.dtype,
            target.max_len,
            lambda what, fraction: target.progress("drafter", fraction),
        )
        layout = head.layer.kv_layout(target.config.kv_dtype)
        cache = KVCache(layout, target.num_blocks, target.config.block_size)
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
                rows = DraftInputs.one_each(
                    active, tokens, depth - 1, self._cache, self._model.dtype
                )
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
        """Compute the positions whose next token is known: all but those of rejected drafts."""
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
            arrays.tables[0].block_tables[chunks],
            self._cache.block_size,
            self._model.dtype,
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


class DeviceHeadPasses:
    """Passes of a head on a GPU (see `device_passes.PassModel`).

    Args:
        spec: of the head.
        target: the target model, with a history of its tokens.
    """

    behind = 1
    has_update = True

    def __init__(self, spec: DrafterSpec, target: DeviceTarget) -> None:
        from inflight.models.eagle3_cuda import Head as DeviceHead

        head, checkpoint = _head_of(spec)
        rows = target.rows
        self.caches: list[KVCache] = []
        self._target = target
        self._head = DeviceHead(
            checkpoint,
            head,
            target.model.weights,
            target.settings,
            target.config.max_num_seqs,
            lambda what, fraction: target.progress("drafter", fraction),
        )
        target.model.set_aux_layers(head.aux_layers)
        self._cache: KVCache | None = None
        self._update_inputs = replace(rows, token_ids=rows.token_ids.new_zeros(len(rows.token_ids)))

    def allocate(self, cache: KVCache, num_blocks: int) -> None:
        target = self._target
        with_scratch = num_blocks + target.config.max_num_seqs
        layout = self._head.spec.layer.kv_layout(target.settings.kv_dtype)
        size, device = target.config.block_size, target.settings.device
        self._cache = KVCache(layout, with_scratch, size, device)
        self.caches = [self._cache]

    def forward(self, size: StepSize) -> None:
        """Nothing to do: the head needs the sampled tokens; see `update`."""

    def update(self, size: StepSize) -> None:
        from inflight_kernels.ops import drafting

        batch, features, rows = self._target.batch, self._target.model.features, self._update_inputs
        assert self._cache is not None and features is not None
        next_ids, num_tokens = rows.token_ids, size.num_tokens
        drafting.next_tokens(batch.step, batch.state, next_ids, size.num_chunks, num_tokens)
        head = self._head
        head.fuse(features, num_tokens)
        head.forward(rows, head.hidden, size, self._cache)

    def compute(
        self, inputs: ForwardInputs, sources: Tensor, num_rows: int, is_first: bool
    ) -> Tensor:
        head = self._head
        assert self._cache is not None
        if is_first:
            head.take(sources)
        else:
            head.forward(inputs, head.drafted, StepSize.decode(num_rows), self._cache)
        head.score(num_rows)
        return head.logits[:num_rows]


def _head_of(spec: DrafterSpec) -> tuple[HeadSpec, Checkpoint]:
    assert isinstance(spec, Eagle3Spec)
    assert spec.head is not None and spec.checkpoint is not None
    return spec.head, spec.checkpoint


def _load_on_device(spec: DrafterSpec, target: DeviceTarget) -> DeviceDrafter:
    from inflight.execution.drafters.device_passes import PassDrafter

    return PassDrafter(DeviceHeadPasses(spec, target), target)


def _read(spec: DrafterSpec, checkpoint: Checkpoint, model: ModelSpec) -> Eagle3Spec:
    assert spec.checkpoint is not None
    head = read_eagle3_spec(spec.checkpoint, model)
    return Eagle3Spec(spec.method, spec.settings, spec.checkpoint, head.layer, head)


METHOD = DraftMethod(
    load=Eagle3Drafter.load,
    load_on_device=_load_on_device,
    read=_read,
    requires_model=True,
    needs_history=True,
    writes_kv=True,
)
