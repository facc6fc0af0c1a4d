"""Drafts by models on the GPU (see `draft_model` and `eagle3`).

A drafting is a chain of passes with one token of each sequence: the model, the choice, a kernel
that keeps the choice and prepares the next pass. A CUDA graph holds a whole drafting.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from inflight.config import EngineConfig
from inflight.execution.cuda_graph import capture_graph
from inflight.execution.device_batch import DeviceBatch
from inflight.execution.drafters.device import DeviceDrafter, DeviceTarget
from inflight.execution.drafters.drafter_spec import DrafterSpec
from inflight.models import CUDA_ARCHITECTURES, eagle3_cuda
from inflight.models.eagle3_cuda import Model as Head
from inflight.models.kv_cache import KVCache
from inflight.models.layers.attention import ForwardInputs
from inflight.models.llama_cuda import Model
from inflight_kernels.ops import drafting, sampling
from inflight_kernels.ops.drafting import DraftLimits, DraftPass

# Numbers of passes that graphs are recorded for, besides the largest.
_PASSES = (1, 2, 3, 5, 8)


def kernels_of(
    source: DrafterSpec, config: EngineConfig, dtype: torch.dtype, max_rows: int
) -> list[tuple[str, str]]:
    """See `device.kernels_of`."""
    found = drafting.kernels_of(passes=True)
    if source.head is not None:
        found += eagle3_cuda.kernels_of(
            source.head,
            dtype,
            max_tokens=config.max_num_batched_tokens,
            max_chunks=config.max_num_seqs,
            batch_invariant=config.batch_invariant,
        )
    elif source.model is not None:
        found += importlib.import_module(CUDA_ARCHITECTURES[source.model.architecture]).kernels_of(
            source.model,
            dtype,
            max_tokens=config.max_num_batched_tokens,
            max_rows=max_rows,
            batch_invariant=config.batch_invariant,
        )
    return found


class PassDrafter(DeviceDrafter, ABC):
    """A drafting as a chain of passes.

    Args:
        target: what is drafted for.
        behind: see `begin_drafting`.
    """

    def __init__(self, target: DeviceTarget, behind: int) -> None:
        super().__init__()
        self._target = target
        self._behind = behind
        self._pass = DraftPass(target.config.max_num_seqs, target.device)
        self._first_scratch = 0
        self._graphs: dict[int, dict[int, torch.cuda.CUDAGraph]] = {}
        taken = self._pass
        self._rows = ForwardInputs(
            token_ids=taken.token_ids,
            positions=taken.positions,
            slot_mapping=taken.slot_mapping,
            query_start=taken.query_start,
            seq_lens=taken.seq_lens,
            tables=target.batch.state.step_tables,
            sample_rows=taken.rows,
        )

    @abstractmethod
    def compute(self, num_rows: int, is_first: bool) -> Tensor:
        """Launch a pass up to its logits [num_rows, vocab_size], which it returns."""

    def draft(self, batch: DeviceBatch, num_chunks: int, num_drafts: int) -> None:
        num_drafts = min(num_drafts, self._target.max_drafts)
        for size, graphs in self._graphs.items():
            if size >= num_chunks:
                next(graph for passes, graph in graphs.items() if passes >= num_drafts).replay()
                return
        self._launch(num_chunks, num_drafts, pdl=True)

    def capture(self, sizes: list[int], pool: Any) -> None:
        most = self._target.max_drafts
        counts = [count for count in _PASSES if count < most] + [most]
        found: dict[int, dict[int, torch.cuda.CUDAGraph]] = {}
        for size in sizes:
            self._launch(size, most)  # what is not compiled or loaded yet cannot be recorded
            torch.cuda.synchronize(self._target.device)
            found[size] = {
                count: capture_graph(pool, self._launch, size, count) for count in counts
            }
        self._graphs = found

    def _launch(self, num_rows: int, num_drafts: int, pdl: bool = False) -> None:
        target, rows = self._target, self._pass
        state = target.batch.state
        limits = DraftLimits(
            target.config.block_size, self._behind, target.max_len, self._first_scratch
        )
        drafting.begin_drafting(target.batch.step, state, rows, num_rows, limits, pdl=pdl)
        inputs, sampled = rows.inputs(num_rows), rows.sampled(num_rows)
        for index in range(num_drafts):
            logits = self.compute(num_rows, index == 0)
            sampling.sample(logits, inputs, target.workspace, sampled, rare=False, pdl=True)
            drafting.advance_drafting(state, rows, num_rows, limits, pdl=True)


class ModelDrafter(PassDrafter):
    """Drafts with a smaller model, or with the target's own first layers.

    Args:
        source: which.
        target: what is drafted for.

    Raises:
        ConfigError: see `device.build`.
    """

    def __init__(self, source: DrafterSpec, target: DeviceTarget) -> None:
        super().__init__(target, behind=0)
        self._own = source.model
        self._num_layers = source.settings.num_layers
        self._model = target.model
        self._cache: KVCache | None = None
        if source.model is not None:
            assert source.checkpoint is not None
            architecture = importlib.import_module(CUDA_ARCHITECTURES[source.model.architecture])
            model: Model = architecture.Model(
                source.checkpoint,
                source.model,
                target.dtype,
                target.max_len,
                lambda what, fraction: target.progress("drafter", fraction),
                device=target.device,
                max_tokens=target.config.max_num_batched_tokens,
                max_rows=target.max_rows,
                batch_invariant=target.config.batch_invariant,
            )
            self._model = model

    def allocate(self, cache: KVCache, num_blocks: int) -> None:
        target, self._first_scratch = self._target, num_blocks
        self._cache = cache
        if self._own is not None:
            with_scratch = num_blocks + target.config.max_num_seqs
            size = target.config.block_size
            self._cache = KVCache(self._own, with_scratch, size, target.dtype, target.device)
            self.caches = [self._cache]

    def forward(self, num_tokens: int, num_chunks: int, max_q_len: int) -> None:
        if self._own is not None:
            assert self._cache is not None
            rows = self._target.rows
            self._model.forward(rows, num_tokens, num_chunks, 0, max_q_len, self._cache)

    def compute(self, num_rows: int, is_first: bool) -> Tensor:
        assert self._cache is not None
        self._model.forward(
            self._rows, num_rows, num_rows, num_rows, 1, self._cache, self._num_layers
        )
        return self._model.logits[:num_rows]


class Eagle3Drafter(PassDrafter):
    """Drafts with an EAGLE-3 head.

    Args:
        source: which.
        target: what is drafted for, with a history of its tokens.

    Raises:
        ConfigError: see `device.build`.
    """

    has_update = True

    def __init__(self, source: DrafterSpec, target: DeviceTarget) -> None:
        super().__init__(target, behind=1)
        assert source.head is not None and source.checkpoint is not None
        config, state, rows = target.config, target.batch.state, target.rows
        self._head = Head(
            source.checkpoint,
            source.head,
            target.model.weights,
            target.dtype,
            target.max_len,
            lambda what, fraction: target.progress("drafter", fraction),
            device=target.device,
            max_tokens=config.max_num_batched_tokens,
            max_chunks=config.max_num_seqs,
            max_rows=target.max_rows,
            batch_invariant=config.batch_invariant,
        )
        target.model.set_aux_layers(source.head.aux_layers)
        self._cache: KVCache | None = None
        self._update_inputs = ForwardInputs(
            token_ids=torch.zeros_like(state.token_ids),
            positions=rows.positions,
            slot_mapping=rows.slot_mapping,
            query_start=rows.query_start,
            seq_lens=rows.seq_lens,
            tables=rows.tables,
            sample_rows=rows.sample_rows,
        )

    def allocate(self, cache: KVCache, num_blocks: int) -> None:
        target, self._first_scratch = self._target, num_blocks
        with_scratch = num_blocks + target.config.max_num_seqs
        layer, size = self._head.config.layer, target.config.block_size
        self._cache = KVCache(layer, with_scratch, size, target.dtype, target.device)
        self.caches = [self._cache]

    def update(self, num_tokens: int, num_chunks: int, max_q_len: int) -> None:
        batch, features, rows = self._target.batch, self._target.model.features, self._update_inputs
        assert self._cache is not None and features is not None
        drafting.next_tokens(batch.step, batch.state, rows.token_ids, num_chunks, num_tokens)
        head = self._head
        head.fuse(features, num_tokens)
        head.forward(rows, head.hidden, num_tokens, num_chunks, max_q_len, self._cache)

    def compute(self, num_rows: int, is_first: bool) -> Tensor:
        head = self._head
        assert self._cache is not None
        if is_first:
            head.take(self._pass.rows[:num_rows])
        else:
            head.forward(self._rows, head.drafted, num_rows, num_rows, 1, self._cache)
        head.score(num_rows)
        return head.logits[:num_rows]
