"""Runs batches on the CPU: forward pass, then sampling and verification of drafts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from inflight.checkpoint.locate import Checkpoint
from inflight.config import EngineConfig
from inflight.core.batch import (
    NO_ALLOWED_TOKENS,
    NOT_FINITE,
    Batch,
    BatchArrays,
    Chunk,
    CompletedStep,
    StepOutput,
    TableArrays,
)
from inflight.core.request import Request
from inflight.core.sequence import Sequence
from inflight.execution.batch.grammar_masks import GrammarMasks
from inflight.execution.drafters.drafter import Drafter, Target
from inflight.execution.drafters.drafter_spec import kv_layout
from inflight.execution.drafters.registry import find_drafter
from inflight.execution.runner import HostMemory
from inflight.execution.sampler import LogitsRow, sample
from inflight.kv.budget import num_kv_blocks
from inflight.kv.cache import KVCache
from inflight.kv.layout import KVTables
from inflight.kv.tiers.fingerprint import kv_fingerprint
from inflight.kv.tiers.host_blocks import HostBlocks, block_parts
from inflight.models.decoder_cpu import Decoder, TableInputs
from inflight.models.spec import ModelSpec
from inflight.sampling.params import SamplingParams
from inflight.scheduling.draft_budget import StepCosts, StepTimes
from inflight_kernels.torch_ops import transformer as ops
from inflight_kernels.torch_ops.sampling import NO_ALLOWED_TOKENS as NO_ALLOWED_TOKENS_STATUS
from inflight_kernels.torch_ops.sampling import NOT_FINITE as NOT_FINITE_STATUS
from inflight_kernels.torch_ops.sampling import OK

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_FAULTS = {NOT_FINITE_STATUS: NOT_FINITE, NO_ALLOWED_TOKENS_STATUS: NO_ALLOWED_TOKENS}

# Sizes of the steps timed for `StepCosts`, in tokens.
_COST_TOKENS = (1, 2, 4, 8, 16)
_TIMINGS = 3

# Rows of logits in a step, for prompt logprobs: 50 MB with a vocabulary of 49152 tokens.
_MAX_ROWS = 256

UNKNOWN_TOKEN = "numerical: a token id is outside the model's vocabulary"


@contextlib.contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Torch's other threads sleep. Each op on a row of logits would wake them, and they spin for a
    while after it: on the cores of the threads that compute linear layers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class CpuRunner:
    """One model on the CPU with its KV pool (see `runner.Runner`).

    Raises:
        ConfigError: the checkpoint or the settings are not supported (see `factory.build`).
    """

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        spec: ModelSpec,
        progress: Callable[[str, float], None],
    ) -> None:
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        source = find_drafter(config, checkpoint, spec)
        layout = kv_layout(spec, source, config.kv_dtype)
        drafter_bytes = 0 if source is None else source.block_bytes(config, config.kv_dtype)
        block_bytes = layout.block_bytes(config.block_size) + drafter_bytes
        self.num_blocks = num_kv_blocks(config, block_bytes)
        self.block_size = config.block_size
        self.kv_tables = KVTables(layout.tables, config.block_size)
        self.vocab_size = spec.vocab_size
        self.max_rows = _MAX_ROWS
        self.steps_ahead = 0
        self.step_costs: StepCosts | None = None
        self.supports_host_drafts = True
        self.gpu_budget_bytes = 0
        self._dtype = _DTYPES[config.dtype]
        self._cache = KVCache(layout, self.num_blocks, self.block_size)
        max_len = spec.max_model_len(config)
        self._model = Decoder(
            checkpoint,
            spec,
            self._dtype,
            max_len,
            progress,
            config.quantization,
            config.kv_cache_dtype,
        )
        self.drafter: Drafter | None = None
        self._caches = [self._cache]
        if source is not None:
            target = Target(
                self._model, self._cache, config, self._dtype, max_len, self.num_blocks, progress
            )
            self.drafter = source.method.load(source, target)
            self._caches += self.drafter.caches
        self._host: HostBlocks | None = None
        self.host_memory: HostMemory | None = None
        self._stored: list[int] = []
        if config.kv_host_memory_bytes:
            parts = block_parts(data for cache in self._caches for data in cache.data)
            self._host = HostBlocks(parts, config.kv_host_memory_bytes)
            self.host_memory = HostMemory(
                self._host.memory.numpy(), kv_fingerprint(config, checkpoint, parts[-1].end)
            )
        if source is not None:
            self.step_costs = self._measure_costs(
                min(source.settings.num_speculative_tokens, max_len - 2)
            )

    def launch(self, batch: Batch) -> CompletedStep:
        return CompletedStep(self._run(batch))

    def take_stored(self) -> list[int]:
        stored, self._stored = self._stored, []
        return stored

    def forget(self, sequence: Sequence) -> None:
        if self.drafter is not None:
            self.drafter.forget(sequence)

    @torch.inference_mode()
    def _run(self, batch: Batch) -> StepOutput:
        output = StepOutput([[] for _ in batch.chunks], [[] for _ in batch.chunks])
        if self._host is not None:
            self._host.load(batch.loads)
            self._host.store(batch.stores)
            self._stored += [store.ticket for store in batch.stores]
        if batch.copies:
            sources, targets = torch.tensor(batch.copies).unbind(1)
            for cache in self._caches:
                for data in cache.data:
                    ops.copy_blocks(data, sources, targets)
        if not batch.chunks:
            return output
        self._clear_tails(batch)
        drafts: list[list[int]] = [[] for _ in batch.chunks]
        if self.drafter is not None:
            drafts = self.drafter.propose(batch.chunks)
            output.from_outputs.update(
                index
                for index, chunk in enumerate(batch.chunks)
                if chunk.sequence.request_id in self.drafter.from_outputs
            )
        arrays = batch.arrays(self.block_size, drafts, self._cache.kernel_blocks)
        self._refuse_unknown_tokens(arrays, output)
        masks = GrammarMasks(batch, drafts)  # computed in parallel with the forward pass
        logits = self._forward(arrays)
        masks.report(output)
        if len(logits):
            with _one_torch_thread() if self._model.has_own_threads else contextlib.nullcontext():
                self._sample(batch, drafts, logits, masks, output)
        if self.drafter is not None:
            self.drafter.update(batch, arrays, output)
        return output

    def _forward(self, arrays: BatchArrays) -> Tensor:
        """Logits of the rows that sample a token, or score a prompt token."""
        tables = [
            TableInputs(
                torch.from_numpy(table.slot_mapping),
                ops.AttentionPlan(
                    table.block_tables,
                    arrays.query_start,
                    arrays.seq_lens,
                    self.block_size,
                    self._dtype,
                    kept.window,
                ),
            )
            for table, kept in zip(arrays.tables, self.kv_tables.tables, strict=True)
        ]
        return self._model.forward(
            torch.from_numpy(arrays.token_ids),
            torch.from_numpy(arrays.positions),
            tables,
            torch.from_numpy(arrays.sample_rows),
            self._cache,
        )

    def _clear_tails(self, batch: Batch) -> None:
        """Zero the slots past a sequence's end in blocks new to it: they may hold stale NaNs."""
        copied = {target for _, target in batch.copies}
        for index, split in enumerate(self._cache.kernel_blocks):
            targets = {*split.ids(list(copied))}
            slots: list[int] = []
            for chunk in batch.chunks:
                slots += self._tail(chunk, index, targets)
            if not slots:
                continue
            for cache in self._caches:
                cache.clear_slots(index, torch.tensor(slots))

    def _tail(self, chunk: Chunk, table: int, copied: set[int]) -> list[int]:
        """The slots past a chunk's tokens in kernel blocks that are new to its sequence."""
        size, split = self.block_size, self._cache.kernel_blocks[table]
        blocks = chunk.sequence.tables[table]
        slots: list[int] = []
        # A drafter fills the slots of drafts one by one.
        begin = chunk.end - chunk.num_drafts
        while begin < chunk.end or begin % size:
            index, offset = divmod(begin, size)
            block = split.id_at(blocks, index)
            if chunk.start <= index * size or block in copied:
                slots.extend(range(block * size + offset, (block + 1) * size))
            begin += size - offset
        return slots

    def _refuse_unknown_tokens(self, arrays: BatchArrays, output: StepOutput) -> None:
        ids = arrays.token_ids
        bad = (ids < 0) | (ids >= self.vocab_size)
        if bad.any():
            rows = np.flatnonzero(bad)
            for index in np.searchsorted(arrays.query_start, rows, side="right") - 1:
                output.errors[int(index)] = UNKNOWN_TOKEN
            ids[bad] = 0

    def _sample(
        self,
        batch: Batch,
        drafts: list[list[int]],
        logits: Tensor,
        masks: GrammarMasks,
        output: StepOutput,
    ) -> None:
        """Sample a token for each row of logits [s, V], in place, verify the drafts, and compute
        the requested prompt logprobs.

        A draft is accepted if the model samples the same token after the drafts before it.
        """
        rows: list[LogitsRow] = []
        for index, (chunk, guessed) in enumerate(zip(batch.chunks, drafts, strict=True)):
            if chunk.num_scores:
                rows += [LogitsRow(chunk.sequence, [], given=token) for token in chunk.scored_ids]
            if chunk.samples:
                rows += [
                    LogitsRow(chunk.sequence, guessed[:count], masks.of_row(index, count))
                    for count in range(1 + len(guessed))
                ]
        choices = sample(logits, rows)
        row = 0
        for index, (chunk, guessed) in enumerate(zip(batch.chunks, drafts, strict=True)):
            if chunk.num_scores:
                scored = slice(row, row + chunk.num_scores)
                row = scored.stop
                if any(status != OK for status in choices.statuses[scored]):
                    output.errors.setdefault(index, NOT_FINITE)
                if index not in output.errors:
                    output.prompt_candidates[index] = choices.candidates[scored]
            if not chunk.samples:
                continue
            last = row
            while last - row < len(guessed) and choices.token_ids[last] == guessed[last - row]:
                if choices.statuses[last] != OK:
                    break
                last += 1
            if choices.statuses[last] != OK:
                output.errors.setdefault(index, _FAULTS[choices.statuses[last]])
            if index not in output.errors:
                chosen = slice(row, last + 1)
                output.token_ids[index] = choices.token_ids[chosen]
                output.logprobs[index] = choices.logprobs[chosen]
                if chunk.sequence.num_candidates is not None:
                    output.candidates[index] = choices.candidates[chosen]
            if guessed:
                output.num_drafted[index] = len(guessed)
            row += 1 + len(guessed)

    def _measure_costs(self, max_drafts: int) -> StepCosts:
        """Time steps of a few tokens of a dummy sequence in block 0."""
        tokens = [count for count in _COST_TOKENS if count <= self.block_size]
        seconds = tuple(map(self._seconds, tokens))
        return StepCosts(StepTimes(tuple(tokens), seconds), self._draft_seconds(max_drafts))

    @torch.inference_mode()
    def _draft_seconds(self, max_drafts: int) -> float:
        """Time to draft one token, the minimum of a few runs on a dummy sequence."""
        drafter = self.drafter
        assert drafter is not None
        sequence = Sequence(Request(-1, [0], SamplingParams()), 1 << 20)
        count = min(max_drafts, self.num_blocks * self.block_size - 2)
        if count < 1:
            return 0.0
        blocks = list(range(-(-(2 + count) // self.block_size)))
        sequence.tables = [blocks for _ in self._cache.kernel_blocks]
        self._run(Batch([Chunk(sequence, 0, 1, True)]))
        sequence.token_ids.append(0)
        times = []
        for _ in range(_TIMINGS):
            started = time.perf_counter()
            drafter.propose([Chunk(sequence, 1, 1 + count, True, num_drafts=count)])
            times.append(time.perf_counter() - started)
        drafter.forget(sequence)
        return min(times) / count

    @torch.inference_mode()
    def _seconds(self, num_tokens: int) -> float:
        """Time of a step, the minimum of a few runs."""
        table = TableArrays(np.arange(num_tokens), np.zeros((1, 1), np.int64))
        arrays = BatchArrays(
            token_ids=np.zeros(num_tokens, np.int64),
            positions=np.arange(num_tokens),
            tables=(table,) * len(self._cache.kernel_blocks),
            query_start=np.array([0, num_tokens]),
            seq_lens=np.array([num_tokens]),
            sample_rows=np.arange(num_tokens),
        )
        times = []
        for _ in range(_TIMINGS):
            started = time.perf_counter()
            self._forward(arrays)
            times.append(time.perf_counter() - started)
        return min(times)
