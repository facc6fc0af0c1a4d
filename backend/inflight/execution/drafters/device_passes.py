"""Drafting with a model on a GPU: a chain of passes with one token per sequence.

A pass consists of the model, sampling, and a kernel that stores the token and prepares the next
pass. A CUDA graph captures a whole chain.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from inflight.core.step_size import StepSize
from inflight.execution.batch.device_batch import DeviceBatch
from inflight.execution.drafters.drafter import DeviceDrafter, DeviceTarget
from inflight.execution.graphs.capture import capture_graph
from inflight.kv.cache import KVCache
from inflight.models.layers.attention import ForwardInputs, TableInputs
from inflight_kernels.ops import drafting, sampling
from inflight_kernels.ops.drafting import DraftLimits, DraftPass

# Numbers of passes for which graphs are captured, besides the largest.
_PASSES = (1, 2, 3, 5, 8)


class PassModel(Protocol):
    """The model whose passes draft.

    Attributes:
        caches: see `DeviceDrafter`.
        has_update: see `DeviceDrafter`.
        behind: see `DraftLimits`.
    """

    caches: list[KVCache]
    has_update: bool
    behind: int

    def allocate(self, cache: KVCache, num_blocks: int) -> None:
        """See `DeviceDrafter`."""

    def forward(self, size: StepSize) -> None:
        """See `DeviceDrafter`."""

    def update(self, size: StepSize) -> None:
        """See `DeviceDrafter`."""

    def compute(
        self, inputs: ForwardInputs, sources: Tensor, num_rows: int, is_first: bool
    ) -> Tensor:
        """Launch a pass up to its logits [num_rows, vocab_size], which are returned.

        Args:
            inputs: of the pass.
            sources: [num_rows] int64, for the first pass: rows of the last step with the token
                before the last one.
            num_rows: of the pass.
            is_first: whether it is the first of its chain.
        """


class PassDrafter(DeviceDrafter):
    """Drafts with a chain of passes.

    Args:
        model: the draft model.
        target: the target model.
    """

    def __init__(self, model: PassModel, target: DeviceTarget) -> None:
        super().__init__()
        self._model = model
        self._target = target
        self.has_update = model.has_update
        self.update = model.update  # type: ignore[method-assign]
        self.forward = model.forward  # type: ignore[method-assign]
        self._pass = DraftPass(target.config.max_num_seqs, target.settings.device)
        self._limits = DraftLimits(
            target.config.block_size, model.behind, target.settings.max_len, 0
        )
        self._graphs: dict[int, dict[int, torch.cuda.CUDAGraph]] = {}
        taken = self._pass
        self._inputs = ForwardInputs(
            token_ids=taken.token_ids,
            positions=taken.positions,
            query_start=taken.query_start,
            seq_lens=taken.seq_lens,
            # Drafters with KV need all tokens of a sequence: there is one table (see `kv_layout`).
            tables=(TableInputs(taken.slot_mapping, target.batch.state.step_tables),),
            sample_rows=taken.rows,
        )

    def allocate(self, cache: KVCache, num_blocks: int) -> None:
        self._model.allocate(cache, num_blocks)
        self.caches = self._model.caches
        self._limits = replace(self._limits, first_scratch=num_blocks)

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
            self._launch(size, most)  # a kernel must be compiled and loaded before capture
            torch.cuda.synchronize(self._target.settings.device)
            found[size] = {
                count: capture_graph(pool, self._launch, size, count) for count in counts
            }
        self._graphs = found

    def _launch(self, num_rows: int, num_drafts: int, pdl: bool = False) -> None:
        target, rows = self._target, self._pass
        state = target.batch.state
        limits = self._limits
        drafting.begin_drafting(target.batch.step, state, rows, num_rows, limits, pdl=pdl)
        inputs, sampled = rows.inputs(num_rows), rows.sampled(num_rows)
        for index in range(num_drafts):
            logits = self._model.compute(
                self._inputs, rows.rows[:num_rows], num_rows, is_first=index == 0
            )
            sampling.sample(logits, inputs, target.workspace, sampled, rare=False, pdl=True)
            drafting.advance_drafting(state, rows, num_rows, limits, pdl=True)
