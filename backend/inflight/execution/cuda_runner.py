"""Runs batches on a GPU, one step ahead of the host.

A step is put into the stream whole - its diffs, its forward pass, its choices - and the host goes
on to plan the next one. Steps in which each sequence computes its next token, or a few more that
are drafted, replay a CUDA graph, and so do those with short prompts; those with more tokens are
launched kernel by kernel, which takes less time than they do.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from inflight.checkpoint.locate import Checkpoint
from inflight.config import EngineConfig
from inflight.core.batch import NO_ALLOWED_TOKENS, NOT_FINITE, Batch, StepOutput
from inflight.core.request import Candidate
from inflight.core.sequence import Sequence
from inflight.errors import ConfigError
from inflight.execution.cuda_graph import capture_graph
from inflight.execution.device_batch import BatchLimits, DeviceBatch, SamplerStages, SubmittedStep
from inflight.execution.drafters.drafter import DeviceDrafter, DeviceTarget, Drafter
from inflight.execution.drafters.drafter_spec import DrafterSpec
from inflight.execution.drafters.registry import find_drafter
from inflight.execution.grammar_masks import GrammarMasks
from inflight.execution.graph_buckets import (
    StepSize,
    capture_sizes,
    row_counts,
    verification_sizes,
)
from inflight.execution.top_logprobs import TopLogprobs
from inflight.kv.budget import num_kv_blocks
from inflight.kv.cache import KVCache
from inflight.models import decoder_cuda
from inflight.models.decoder_cuda import Decoder, DecoderSettings
from inflight.models.layers.attention import ForwardInputs
from inflight.models.spec import ModelSpec
from inflight.sampling.logit_adjustments import BANNED
from inflight.scheduling.draft_budget import StepCosts
from inflight_kernels.ops import batch_state, cache, sampling
from inflight_kernels.runtime.compile import CompileError
from inflight_kernels.runtime.launch import precompile_kernels

logger = logging.getLogger(__name__)

_DTYPE = torch.bfloat16
# What a status of the sampler means to whoever sent the request.
_FAULTS = {sampling.NOT_FINITE: NOT_FINITE, sampling.NO_ALLOWED_TOKENS: NO_ALLOWED_TOKENS}

# Tokens per chunk: attention has kernels for few, some and many rows.
_WARM_UP_LENGTHS = (1, 2, 8, 64)

# Of a step whose cost is measured.
_TIMINGS = 3


# Sequences up to which a drafting is recorded: with more, few drafts pay.
_MAX_GRAPH_DRAFT_SEQS = 64


def kernels_of(
    config: EngineConfig, spec: ModelSpec, source: DrafterSpec | None, settings: DecoderSettings
) -> list[tuple[str, str]]:
    """Stem and name of the kernels that an engine may launch: those that take long to compile
    first, those that a start does without last.

    Args:
        config: the engine's settings.
        spec: of the model that it runs.
        source: what drafts, if anything does.
        settings: how the model runs.
    """
    found = sampling.kernels_of(torch.float32) + decoder_cuda.kernels_of(spec, settings)
    if source is not None:
        found += source.method.device_kernels(source, config, settings)
    return found + batch_state.kernels_of() + cache.kernels_of(torch.int64)


class CudaRunner:
    """One model on one GPU with its KV pool (see `runner.Runner`).

    Attributes:
        timings: seconds that the phases of the start took, by name.

    Raises:
        ConfigError: the checkpoint or the settings cannot work (see `runner.build`).
    """

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        spec: ModelSpec,
        progress: Callable[[str, float], None],
    ) -> None:
        if not torch.cuda.is_available():
            raise ConfigError("device: torch finds no CUDA device, or is a CPU-only build")
        self.timings: dict[str, float] = {}
        self._clock = time.perf_counter()
        speculation = config.speculative_config
        self._max_drafts = speculation.num_speculative_tokens if speculation else 0
        self._max_rows = config.max_num_seqs
        if speculation is not None:
            most = config.max_num_seqs + config.max_draft_tokens
            self._max_rows = min(most, config.max_num_batched_tokens)
        self.max_rows = self._max_rows
        source = find_drafter(config, checkpoint, spec)
        max_len = spec.max_model_len(config)
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._settings = DecoderSettings(
            _DTYPE,
            self._device,
            max_len,
            config.max_num_batched_tokens,
            self._max_rows,
            config.batch_invariant,
        )
        # Before all else: whatever takes time here then happens meanwhile.
        precompile_kernels(kernels_of(config, spec, source, self._settings))
        self.block_size = config.block_size
        self.vocab_size = spec.vocab_size
        self.steps_ahead = 1
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self.drafter: DeviceDrafter | None = None
        self._host_drafter: Drafter | None = None
        if source is not None and source.method.load_on_host is not None:
            self._host_drafter = source.method.load_on_host(source)
        self.supports_host_drafts = self._host_drafter is not None
        self.step_costs: StepCosts | None = None
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            try:
                self._load(config, checkpoint, spec, source, progress)
                self._prepare(config, progress)
            except torch.OutOfMemoryError as error:
                raise ConfigError(
                    f"gpu_memory: the model does not fit the GPU ({error}); lower "
                    "max_num_batched_tokens or max_num_seqs"
                ) from None
            except CompileError as error:
                raise ConfigError(f"device: the kernels could not be compiled: {error}") from None
        logger.info(
            "%d KV blocks; seconds: %s",
            self.num_blocks,
            ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.timings.items()),
        )

    def _load(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        spec: ModelSpec,
        source: DrafterSpec | None,
        progress: Callable[[str, float], None],
    ) -> None:
        """Load the weights, then take the memory of steps and of the KV pool."""
        self._model = Decoder(checkpoint, spec, self._settings, progress)
        limits = BatchLimits(
            config.max_num_seqs,
            config.max_num_batched_tokens,
            -(-self._settings.max_len // self.block_size),
            self._max_rows,
            self._max_drafts,
            self._settings.max_len if source is not None and source.method.needs_history else 0,
        )
        self._batch = DeviceBatch(limits, self.vocab_size, self._device)
        step, state = self._batch.step, self._batch.state
        self._rows = ForwardInputs(
            state.token_ids,
            state.positions,
            state.slot_mapping,
            step.query_start,
            state.seq_lens,
            state.step_tables,
            state.sample_rows,
        )
        self._sampling = sampling.Workspace(self._max_rows, self.vocab_size, self._device)
        self._top_logprobs = TopLogprobs(self._max_rows, self._sampling, self._device)
        if source is not None:
            target = self._target(config, progress)
            self.drafter = source.method.load_on_device(source, target)
        self._end_phase("weights")
        self._allocate(config, spec, source)
        self._end_phase("kv cache")

    def _prepare(self, config: EngineConfig, progress: Callable[[str, float], None]) -> None:
        """Compile and load the kernels, record graphs of steps, measure what drafts cost."""
        progress("kernels", 0.0)
        self._warm_up(config)
        self._end_phase("kernels")
        self._graphs: dict[StepSize, _Graph] = {}
        pool = torch.cuda.graph_pool_handle() if config.cuda_graphs else None
        if pool is not None:
            self._capture_graphs(config, pool, progress)
        self._end_phase("graphs")
        self._warm_up_sampler(config, pool)
        self._end_phase("sampler")
        if self.drafter is not None:
            self.step_costs = self._measure_costs()
            self._end_phase("costs")

    def launch(self, batch: Batch) -> _PendingCudaStep:
        size = StepSize.of(batch)
        bucket = next((bucket for bucket in self._graphs if bucket.fits(size)), None)
        graph = None if bucket is None else self._graphs[bucket]
        drafts = self._host_drafts(batch)
        masks = GrammarMasks(batch, drafts)
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            sent = self._batch.send(batch, size, *self._caches, bucket=bucket, drafts=drafts)
            if graph is not None:
                graph.step.replay()
            else:
                self._forward(size)
            if SamplerStages.MASKS in sent.stages:
                self._batch.send_masks(batch, masks)  # the device computes meanwhile
            self._sample(sent)
            ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ended.record()
            if self.drafter is not None:
                if graph is not None and graph.update is not None:
                    graph.update.replay()
                elif self.drafter.has_update:
                    self._update_drafter(size)
                if sent.num_drafts:
                    self.drafter.draft(self._batch, size.num_chunks, sent.num_drafts)
        return _PendingCudaStep(self._batch, self._top_logprobs, masks, batch, sent, ended)

    def forget(self, sequence: Sequence) -> None:
        # Its slot is found free when another sequence stages one.
        if self._host_drafter is not None:
            self._host_drafter.forget(sequence)

    def _host_drafts(self, batch: Batch) -> list[list[int]]:
        """Drafts of the sequences that need the host; of the others the device has them.

        The host must know them to say what may follow each of them. Where fewer are found than were
        scheduled, token 0 is guessed.
        """
        drafts: list[list[int]] = [[] for _ in batch.chunks]
        if self._host_drafter is not None:
            places = [
                index
                for index, chunk in enumerate(batch.chunks)
                if chunk.num_drafts and chunk.sequence.needs_committed_tokens
            ]
            chunks = [batch.chunks[index] for index in places]
            for index, chunk, found in zip(
                places, chunks, self._host_drafter.propose(chunks), strict=True
            ):
                drafts[index] = found + [0] * (chunk.num_drafts - len(found))
        return drafts

    def _target(self, config: EngineConfig, progress: Callable[[str, float], None]) -> DeviceTarget:
        return DeviceTarget(
            self._model,
            self._rows,
            self._batch,
            self._sampling,
            config,
            self._settings,
            self._max_drafts,
            progress,
        )

    def _allocate(self, config: EngineConfig, spec: ModelSpec, source: DrafterSpec | None) -> None:
        """Take the memory of the KV pool, and of what a drafter has beside it."""
        free, drafter_bytes, num_scratch = self._free_bytes(config.gpu_memory), 0, 0
        if source is not None:
            free -= source.scratch_bytes(config, spec)
            drafter_bytes = source.block_bytes(config)
            num_scratch = config.max_num_seqs if source.method.shares_target_kv else 0
        layout = spec.kv_layout(self._settings.kv_dtype)
        block_bytes = layout.block_bytes(config.block_size) + drafter_bytes
        self.num_blocks = num_blocks = num_kv_blocks(config, block_bytes, free)
        with_scratch = num_blocks + num_scratch
        self._cache = KVCache(layout, with_scratch, self.block_size, self._device)
        self._caches = list(self._cache.data)
        if self.drafter is not None:
            self.drafter.allocate(self._cache, num_blocks)
            self._caches += [data for cache in self.drafter.caches for data in cache.data]

    def _forward(self, size: StepSize) -> None:
        """Launch a step's kernels up to the logits of each row."""
        step, state = self._batch.step, self._batch.state
        num_tokens, num_chunks, num_rows = size.num_tokens, size.num_chunks, size.num_rows
        batch_state.begin_step(step, state, num_chunks, self.block_size, num_tokens, num_rows)
        self._model.forward(
            self._rows, num_tokens, num_chunks, num_rows, size.max_q_len, self._cache
        )
        if self.drafter is not None:
            self.drafter.forward(num_tokens, num_chunks, size.max_q_len)

    def _update_drafter(self, size: StepSize) -> None:
        """Launch what a drafter does when a step has chosen its tokens."""
        assert self.drafter is not None
        self.drafter.update(size.num_tokens, size.num_chunks, size.max_q_len)

    def _sample(self, sent: SubmittedStep) -> None:
        """Launch the choice of tokens; what no row asks for is left out, so no graph holds it."""
        batch, num_rows, stages = self._batch, sent.size.num_rows, sent.stages
        step, state, logits = batch.step, batch.state, self._model.logits[:num_rows]
        penalties, masks = SamplerStages.PENALTIES in stages, SamplerStages.MASKS in stages
        inputs = sampling.SamplingInputs(
            state.step_row_params[:num_rows].view(torch.uint8),
            state.sample_positions[:num_rows],
            batch.penalties(num_rows) if penalties else None,
            sent.logit_bias,
            sampling.TokenMasks(batch.masks, step.mask_rows[:num_rows]) if masks else None,
        )
        sampled = state.sampled(num_rows)
        sampling.sample(
            logits,
            inputs,
            self._sampling,
            sampled,
            filters=bool(stages & (SamplerStages.FILTERS | SamplerStages.RARE_FILTERS)),
            rare=SamplerStages.RARE_FILTERS in stages,
            pdl=True,
        )
        if SamplerStages.TOP_LOGPROBS in stages:
            if sent.bans is not None:
                banned = torch.full((), BANNED, dtype=logits.dtype, device=self._device)
                logits.index_put_(sent.bans, banned)  # the sampler has had them as they came
            self._top_logprobs.launch(logits, step, sampled, sent.ring_index)
        batch_state.end_step(step, state, sent.size.num_chunks, pdl=True)
        if penalties:
            slots = state.count_slots[:num_rows]
            sampling.count_output_tokens(slots, sampled.token_ids, batch.counts, pdl=True)

    def _free_bytes(self, share: float) -> int:
        """Memory for the pool: what is free, but for the share of the card that stays so."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return free - int(total * (1.0 - share))

    def _warm_up(self, config: EngineConfig) -> None:
        """Run steps of each kind on nobody's tokens: what they need is compiled, loaded, allocated.

        The largest among them proves that its memory is there.
        """
        self._empty_step()
        limit = min(config.max_num_batched_tokens, self.num_blocks * self.block_size)
        for chunks in self._warm_up_counts(config):
            for q_len in (*_WARM_UP_LENGTHS, limit // chunks):
                if 0 < chunks * q_len <= limit:
                    size = StepSize(chunks * q_len, chunks, chunks, q_len)
                    self._forward(size)
                    if self.drafter is not None:
                        self._update_drafter(size)
        torch.cuda.synchronize(self._device)

    def _warm_up_sampler(self, config: EngineConfig, pool: Any) -> None:
        """The same for what comes after a step's forward pass, and record the drafting.

        Last, for these kernels take longest to compile.

        Args:
            pool: of the graphs; None where none are recorded.
        """
        self._empty_step()
        every = SamplerStages(sum(need.value for need in SamplerStages))
        self._sample(SubmittedStep(StepSize(1, 1, 1, 1), [0, 1], 0, every, 0, None, None))
        if self.drafter is not None:
            for chunks in self._warm_up_counts(config):
                self.drafter.draft(self._batch, chunks, self._max_drafts)
            if pool is not None:
                most = min(config.max_num_seqs, _MAX_GRAPH_DRAFT_SEQS)
                self.drafter.capture(row_counts(most), pool)
        torch.cuda.synchronize(self._device)

    def _warm_up_counts(self, config: EngineConfig) -> list[int]:
        """Chunks of the steps to warm up with."""
        most = config.max_num_seqs
        return sorted({1, min(2, most), most})

    def _empty_step(self) -> None:
        """Have a step on the device that has no chunk: no block is read or written."""
        self._batch.step.buffer.zero_()
        self._batch.state.slot_mapping.fill_(-1)

    def _capture_graphs(
        self, config: EngineConfig, pool: Any, progress: Callable[[str, float], None]
    ) -> None:
        """Record a step of each size that is worth it, the largest first.

        Graphs share one pool of memory: only one of them runs at a time.
        """
        most_tokens = min(config.max_num_batched_tokens, self.num_blocks * self.block_size)
        sizes = capture_sizes(
            config.max_num_seqs,
            self._max_rows,
            self._max_drafts,
            most_tokens,
            self._model.spec.matrix_elements_per_layer,
        )
        found: dict[StepSize, _Graph] = {}
        for count, size in enumerate(sorted(sizes, key=lambda size: -size.num_tokens), 1):
            self._forward(size)  # what is not compiled or loaded yet cannot be recorded
            torch.cuda.synchronize(self._device)
            graph = found[size] = _Graph(capture_graph(pool, self._forward, size))
            if self.drafter is not None and self.drafter.has_update:
                self._update_drafter(size)
                torch.cuda.synchronize(self._device)
                graph.update = capture_graph(pool, self._update_drafter, size)
            progress("graphs", count / len(sizes))
        self._graphs = {size: found[size] for size in sizes}

    def _measure_costs(self) -> StepCosts:
        """Time a step of each size with drafts, on nobody's tokens."""
        drafter = self.drafter
        assert drafter is not None
        self._empty_step()
        sizes = verification_sizes(self._max_rows, self._max_drafts)
        sizes = sizes or [StepSize(1, 1, 1, 1)]  # steps of one token, which no draft fits into
        seconds = []
        for size in sizes:
            graph = self._graphs.get(size)

            def step(graph: _Graph | None = graph, size: StepSize = size) -> None:
                if graph is None:
                    self._forward(size)
                    self._update_drafter(size)
                else:
                    graph.step.replay()
                    if graph.update is not None:
                        graph.update.replay()

            seconds.append(self._seconds(step))
        most = self._max_drafts
        drafting = self._seconds(lambda: drafter.draft(self._batch, 1, most)) / most
        counts = [size.num_rows for size in sizes]
        return StepCosts((1, *counts), (seconds[0], *seconds), drafting)

    def _seconds(self, call: Callable[[], None]) -> float:
        """Of a call's work on the device: the shortest of a few."""
        times = []
        for _ in range(_TIMINGS):
            started = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            started.record()
            call()
            ended.record()
            ended.synchronize()
            times.append(float(started.elapsed_time(ended)) * 1e-3)
        return min(times)

    def _end_phase(self, phase: str) -> None:
        now = time.perf_counter()
        self.timings[phase] = now - self._clock
        self._clock = now


@dataclass(slots=True)
class _Graph:
    """A recorded step.

    Attributes:
        step: up to the logits.
        update: what a drafter does when the tokens are chosen; None if nothing.
    """

    step: torch.cuda.CUDAGraph
    update: torch.cuda.CUDAGraph | None = None


class _PendingCudaStep:
    """A step in the stream (see `runner.PendingStep`)."""

    def __init__(
        self,
        device: DeviceBatch,
        top_logprobs: TopLogprobs,
        masks: GrammarMasks,
        batch: Batch,
        sent: SubmittedStep,
        ended: torch.cuda.Event,
    ) -> None:
        self._device = device
        self._top_logprobs = top_logprobs
        self._masks = masks
        self._batch = batch
        self._sent = sent
        self._ended = ended

    def result(self) -> StepOutput:
        self._ended.synchronize()
        output = StepOutput([], [])
        self._masks.report(output)
        results = self._device.results(self._batch, self._sent)
        for index, (chunk, chosen) in enumerate(zip(self._batch.chunks, results, strict=True)):
            if chunk.num_drafts:
                output.num_drafted[index] = chunk.num_drafts
            fine = chunk.samples and chosen.status == sampling.OK
            output.token_ids.append(chosen.token_ids if fine else [])
            output.logprobs.append(chosen.logprobs if fine else [])
            if chunk.samples and not fine:
                output.errors.setdefault(index, _FAULTS[chosen.status])
            params, first = chunk.sequence.request.params, self._sent.row_start[index]
            if chunk.num_scores:
                found = self._candidates_of(
                    first, chunk.scored_ids, params.num_prompt_logprobs or 0
                )
                if all(own[0].rank for own in found):
                    output.prompt_candidates[index] = found
                else:
                    output.errors.setdefault(index, NOT_FINITE)
            count = chunk.sequence.num_candidates
            if fine and count is not None:
                first += chunk.num_scores
                output.candidates[index] = self._candidates_of(first, chosen.token_ids, count)
        return output

    def _candidates_of(self, first: int, token_ids: list[int], count: int) -> list[list[Candidate]]:
        return self._top_logprobs.of_rows(self._sent.ring_index, first, token_ids, count)
