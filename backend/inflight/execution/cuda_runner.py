"""Runs batches on a GPU, one step ahead of the host.

A whole step is enqueued on the stream - diffs, forward pass, sampling - while the host plans the
next one. Decode steps, with or without drafts, and steps with short prompts replay a CUDA graph;
larger steps are launched kernel by kernel, which takes less time than they run.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from inflight.checkpoint.locate import Checkpoint
from inflight.config import EngineConfig
from inflight.core.batch import Batch, CompletedStep, Load, StepOutput
from inflight.core.sequence import Sequence
from inflight.core.step_size import StepSize
from inflight.errors import ConfigError
from inflight.execution.batch.device_batch import SubmittedStep
from inflight.execution.batch.grammar_masks import GrammarMasks
from inflight.execution.batch.step_upload import SamplerStages
from inflight.execution.cuda_step import HostDrafts, PendingCudaStep
from inflight.execution.device_steps import DeviceSteps
from inflight.execution.drafters.drafter import DeviceDrafter, Drafter
from inflight.execution.drafters.drafter_spec import DrafterSpec, kv_layout
from inflight.execution.drafters.registry import find_drafter
from inflight.execution.graphs.buckets import capture_sizes, prompt_key_counts, row_counts
from inflight.execution.graphs.capture import capture_graph
from inflight.execution.launch_recording import find_kernels
from inflight.execution.runner import HostMemory, PendingStep
from inflight.execution.step_timing import TimedLimits, device_seconds, measure_costs
from inflight.execution.stream_mode import OnStream
from inflight.kv.budget import gpu_budget_bytes, gpu_pool_bytes, num_kv_blocks
from inflight.kv.layout import KVTables
from inflight.kv.tiers.fingerprint import kv_fingerprint
from inflight.kv.tiers.host_blocks import block_parts
from inflight.kv.tiers.host_transfers import HostTransfers
from inflight.models.decoder_cuda import DecoderSettings
from inflight.models.spec import ModelSpec
from inflight.scheduling.draft_budget import StepCosts
from inflight_kernels.runtime.compile import CompileError
from inflight_kernels.runtime.launch import precompile_kernels

logger = logging.getLogger(__name__)

_DTYPE = torch.bfloat16

# Tokens per chunk: attention has kernels for few, some and many rows per chunk.
_WARM_UP_LENGTHS = (1, 2, 8, 64)

# Blocks in a timed load from host memory.
_TIMED_LOADS = 16

# Sizes of steps whose buckets are remembered: in a hundred of them, one is sought for 20 us.
_MAX_KNOWN_BUCKETS = 4096

# Sampling is captured for up to so many rows, where drafting follows: its launches take the host 50
# us. Elsewhere the upload of the next step would begin later, behind a graph, by 5 us.
_MAX_GRAPH_SAMPLED_ROWS = 64

# Drafting is captured for up to so many sequences: with more, drafting rarely pays off.
_MAX_GRAPH_DRAFT_SEQS = 64


def _max_rows(config: EngineConfig) -> int:
    """Rows of logits in a step: one of each sequence, and one of each draft."""
    if config.speculative_config is None:
        return config.max_num_seqs
    return min(config.max_num_seqs + config.max_draft_tokens, config.max_num_batched_tokens)


def _decoder_settings(
    config: EngineConfig, spec: ModelSpec, device: torch.device
) -> DecoderSettings:
    return DecoderSettings(
        _DTYPE,
        device,
        spec.max_model_len(config),
        config.max_num_batched_tokens,
        _max_rows(config),
        config.batch_invariant,
        config.quantization,
        config.kv_cache_dtype,
    )


class CudaRunner:
    """One model on one GPU with its KV pool (see `runner.Runner`).

    Attributes:
        timings: seconds of each phase of the start.

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
        if not torch.cuda.is_available():
            raise ConfigError("device: no CUDA device found by torch, or a CPU-only build of torch")
        self.timings: dict[str, float] = {}
        self._clock = time.perf_counter()
        speculation = config.speculative_config
        self._max_drafts = speculation.num_speculative_tokens if speculation else 0
        self.max_rows = self._max_rows = _max_rows(config)
        source = find_drafter(config, checkpoint, spec)
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._settings = _decoder_settings(config, spec, self._device)
        # First, so that everything slow below overlaps with compilation.
        precompile_kernels(find_kernels(config, checkpoint, spec, source, self._settings))
        self._allocated_before = self._allocated_bytes()  # other engines of this process
        self.block_size = config.block_size
        self.vocab_size = spec.vocab_size
        self.steps_ahead = 1
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._on_stream = OnStream(self._stream)
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self.drafter: DeviceDrafter | None = None
        self._host_drafter: Drafter | None = None
        if source is not None and source.method.load_on_host is not None:
            self._host_drafter = source.method.load_on_host(source)
        self.supports_host_drafts = self._host_drafter is not None
        self.step_costs: StepCosts | None = None
        with self._on_stream:
            try:
                self._steps = DeviceSteps(
                    config, checkpoint, spec, source, self._settings, progress
                )
                self.drafter = self._steps.drafter
                self._end_phase("weights")
                self._allocate(config, spec, source)
                self._allocate_host_memory(config, checkpoint)
                self._end_phase("kv cache")
                self._prepare(config, progress)
            except torch.OutOfMemoryError as error:
                raise ConfigError(
                    "gpu_memory_utilization: the model does not fit in GPU memory "
                    f"({error}); lower max_num_batched_tokens or max_num_seqs"
                ) from None
            except CompileError as error:
                raise ConfigError(f"device: the kernels could not be compiled: {error}") from None
        logger.info(
            "%d KV blocks; seconds: %s",
            self.num_blocks,
            ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.timings.items()),
        )

    def _prepare(self, config: EngineConfig, progress: Callable[[str, float], None]) -> None:
        """Compile and load the kernels, capture CUDA graphs, measure the cost of drafts."""
        progress("kernels", 0.0)
        self._warm_up(config)
        self._end_phase("kernels")
        self._measure_loads(config)
        self._graphs: dict[StepSize, _Graph] = {}
        self._buckets: dict[StepSize, StepSize | None] = {}  # of sizes that steps had
        pool = torch.cuda.graph_pool_handle() if config.cuda_graphs else None
        if pool is not None:
            self._capture_graphs(config, pool, progress)
        self._end_phase("graphs")
        self._warm_up_sampler(config, pool)
        self._end_phase("sampler")
        if self.drafter is not None:
            self.step_costs = self._measure_costs(config)
            self._end_phase("costs")

    def launch(self, batch: Batch) -> PendingStep:
        if not batch.chunks:
            if self._host is not None:
                with self._on_stream:
                    self._host.launch(batch)
            return CompletedStep(StepOutput([], []))
        steps, size = self._steps, StepSize.of(batch)
        bucket = self._bucket_for(size)
        graph = None if bucket is None else self._graphs[bucket]
        drafts = self._host_drafts(batch)
        masks = GrammarMasks(batch, drafts.token_ids)
        with self._on_stream:
            if self._host is not None:
                self._host.launch(batch)
            sent = steps.batch.send(
                batch, size, *steps.caches, bucket=bucket, drafts=drafts.token_ids
            )
            if graph is not None:
                graph.step.replay()
            else:
                steps.forward(size)
            if SamplerStages.MASKS in sent.stages:
                steps.batch.send_masks(batch, masks)  # the device computes meanwhile
            drafts_follow = self._drafts_follow(batch, sent)
            if graph is not None and graph.sample is not None and sent.is_plain and drafts_follow:
                graph.sample.replay()
            else:
                steps.sample(sent)
            ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ended.record(self._stream)
            if self.drafter is not None:
                if graph is not None and graph.update is not None:
                    graph.update.replay()
                elif self.drafter.has_update:
                    steps.update_drafter(size)
                if drafts_follow:
                    self.drafter.draft(steps.batch, size.num_chunks, sent.num_drafts)
        return PendingCudaStep(steps.batch, steps.top_logprobs, masks, batch, sent, drafts, ended)

    def _drafts_follow(self, batch: Batch, sent: SubmittedStep) -> bool:
        """Whether the drafter works for the next step: for drafts, or for a report."""
        if self.drafter is None or sent.num_drafts or not self.drafter.is_search:
            return bool(sent.num_drafts)
        return any(chunk.sequence.adapts_drafts for chunk in batch.chunks)

    def _bucket_for(self, size: StepSize) -> StepSize | None:
        """The captured size in which a step of this one runs; None if there is none."""
        if size in self._buckets:
            return self._buckets[size]
        if len(self._buckets) >= _MAX_KNOWN_BUCKETS:
            self._buckets.clear()
        found = next((bucket for bucket in self._graphs if bucket.fits(size)), None)
        self._buckets[size] = found
        return found

    def take_stored(self) -> list[int]:
        return [] if self._host is None else self._host.take_stored()

    def forget(self, sequence: Sequence) -> None:
        # Its slot is reclaimed when another sequence stages one.
        if self._host_drafter is not None:
            self._host_drafter.forget(sequence)

    def _host_drafts(self, batch: Batch) -> HostDrafts:
        """Drafts of the sequences that need committed tokens; the device drafts for the others.

        The host computes adjustments and masks after each of these drafts, so it must know them.
        Where fewer are found than scheduled, token 0 fills the rest.
        """
        drafts = HostDrafts([[] for _ in batch.chunks])
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
                drafts.token_ids[index] = found + [0] * (chunk.num_drafts - len(found))
                drafts.num_found[index] = len(found)
                if chunk.sequence.request_id in self._host_drafter.from_outputs:
                    drafts.from_outputs.add(index)
        return drafts

    def _allocate(self, config: EngineConfig, spec: ModelSpec, source: DrafterSpec | None) -> None:
        """Allocate the KV pool, and the drafter's caches."""
        kv_dtype = self._settings.kv_dtype
        used = self._allocated_bytes() - self._allocated_before
        layout = kv_layout(spec, source, kv_dtype)
        self.kv_tables = KVTables(layout.tables, config.block_size)
        block_bytes = layout.block_bytes(config.block_size)
        if source is not None:
            used += source.scratch_bytes(config, spec, kv_dtype)
            block_bytes += source.block_bytes(config, kv_dtype)
        _, total = torch.cuda.mem_get_info(self._device)
        max_blocks = self.kv_tables.num_blocks(spec.max_model_len(config))
        sizes = (total, used, block_bytes, max_blocks)
        self.num_blocks = num_kv_blocks(config, block_bytes, gpu_pool_bytes(config, *sizes))
        self.gpu_budget_bytes = gpu_budget_bytes(config, *sizes)
        self._steps.allocate(self.num_blocks)

    def _allocate_host_memory(self, config: EngineConfig, checkpoint: Checkpoint) -> None:
        self._host: HostTransfers | None = None
        self.host_memory: HostMemory | None = None
        if config.kv_host_memory_bytes:
            parts = block_parts(self._steps.caches)
            self._host = HostTransfers(parts, config.kv_host_memory_bytes)
            self.host_memory = HostMemory(
                self._host.blocks.memory.numpy(), kv_fingerprint(config, checkpoint, parts[-1].end)
            )

    def _allocated_bytes(self) -> int:
        """GPU memory that torch has reserved in this process."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self._device)

    def _warm_up(self, config: EngineConfig) -> None:
        """Run dummy steps of each kind, so that everything is compiled, loaded and allocated.

        The largest one proves that its memory is available.
        """
        self._steps.batch.clear()
        limit = min(config.max_num_batched_tokens, self.kv_tables.max_tokens(self.num_blocks))
        for chunks in self._warm_up_counts(config):
            for q_len in (*_WARM_UP_LENGTHS, limit // chunks):
                if not 0 < chunks * q_len <= limit:
                    continue
                for prompt_keys in prompt_key_counts(self._steps.model.settings.quantized_kv):
                    size = StepSize(chunks * q_len, chunks, chunks, q_len, prompt_keys)
                    self._steps.forward(size)
                    if self.drafter is not None:
                        self._steps.update_drafter(size)
        torch.cuda.synchronize(self._device)

    def _warm_up_sampler(self, config: EngineConfig, pool: Any) -> None:
        """The same for the sampler and the drafter, whose graphs are captured.

        Last, because these kernels take longest to compile.

        Args:
            pool: of the graphs; None to capture none.
        """
        self._steps.batch.clear()
        every = SamplerStages(sum(need.value for need in SamplerStages))
        self._steps.sample(_submitted(StepSize(1, 1, 1, 1), every))
        if self.drafter is not None:
            for size, graph in self._graphs.items():
                if size.num_rows == size.num_tokens <= _MAX_GRAPH_SAMPLED_ROWS:
                    plain = _submitted(size, SamplerStages.NONE)
                    graph.sample = capture_graph(pool, self._steps.sample, plain)
            for chunks in self._warm_up_counts(config):
                self.drafter.draft(self._steps.batch, chunks, self._max_drafts)
            if pool is not None:
                most = min(config.max_num_seqs, _MAX_GRAPH_DRAFT_SEQS)
                self.drafter.capture(row_counts(most), pool)
        torch.cuda.synchronize(self._device)

    def _warm_up_counts(self, config: EngineConfig) -> list[int]:
        """Numbers of chunks to warm up with."""
        most = config.max_num_seqs
        return sorted({1, min(2, most), most})

    def _capture_graphs(
        self, config: EngineConfig, pool: Any, progress: Callable[[str, float], None]
    ) -> None:
        """Capture a graph of each size that is worth it, the largest first.

        Graphs share one memory pool: only one of them runs at a time.
        """
        capacity = self.kv_tables.max_tokens(self.num_blocks)
        most_tokens = min(config.max_num_batched_tokens, capacity)
        sizes = capture_sizes(
            config.max_num_seqs,
            self._max_rows,
            self._max_drafts,
            most_tokens,
            self._steps.model.spec.matrix_elements_per_layer,
            self._settings.max_prompt_keys,
        )
        found: dict[StepSize, _Graph] = {}
        for count, size in enumerate(sorted(sizes, key=lambda size: -size.num_tokens), 1):
            self._steps.forward(size)  # a kernel must be compiled and loaded before capture
            torch.cuda.synchronize(self._device)
            graph = found[size] = _Graph(capture_graph(pool, self._steps.forward, size))
            if self.drafter is not None and self.drafter.has_update:
                self._steps.update_drafter(size)
                torch.cuda.synchronize(self._device)
                graph.update = capture_graph(pool, self._steps.update_drafter, size)
            progress("graphs", count / len(sizes))
        self._graphs = {size: found[size] for size in sizes}

    def _measure_costs(self, config: EngineConfig) -> StepCosts:
        """Time steps with and without drafts, on dummy sequences."""
        drafter = self.drafter
        assert drafter is not None

        def run(size: StepSize) -> None:
            graph = self._graphs.get(size)
            if graph is None:
                self._steps.forward(size)
                self._steps.update_drafter(size)
                return
            graph.step.replay()
            if graph.update is not None:
                graph.update.replay()

        limits = TimedLimits(
            config.max_num_seqs, self._max_rows, self._max_drafts, self._settings.max_len
        )
        return measure_costs(self._steps.batch, drafter, run, limits)

    def _measure_loads(self, config: EngineConfig) -> None:
        """Find out how long a prefix must be for its blocks to be loaded, not computed."""
        host, memory = self._host, self.host_memory
        if host is None or memory is None:
            return
        count = min(_TIMED_LOADS, self.num_blocks)
        host.blocks.memory[0] = 0  # never NaN in a block of the pool
        loads = [Load(0, block) for block in range(count)]
        first, every = (
            device_seconds(partial(host.launch, Batch([], loads=some, reads_loads=True)))
            for some in (loads[:1], loads)
        )
        num_tokens = min(config.max_num_batched_tokens, self.kv_tables.max_tokens(self.num_blocks))
        self._steps.batch.clear()
        prompt_keys = prompt_key_counts(self._steps.model.settings.quantized_kv)[-1]
        step = StepSize(num_tokens, 1, 1, num_tokens, prompt_keys)
        computing = device_seconds(partial(self._steps.forward, step)) / num_tokens
        loading = every / count / min(self.kv_tables.spans)
        if loading < computing:
            min_tokens = 1 + int(first / (computing - loading))
        else:
            min_tokens = self._settings.max_len
            logger.warning(
                "kv_host_memory_bytes: computing a token takes %.1f us and loading it %.1f us, so "
                "nothing is loaded; leave it out",
                computing * 1e6,
                loading * 1e6,
            )
        self.host_memory = dataclasses.replace(memory, min_tokens=min_tokens)

    def _end_phase(self, phase: str) -> None:
        now = time.perf_counter()
        self.timings[phase] = now - self._clock
        self._clock = now


@dataclass(slots=True)
class _Graph:
    """The CUDA graphs of a step.

    Attributes:
        step: up to the logits.
        sample: sampling of all its rows without optional stages; None if it is not captured.
        update: the drafter's work after sampling; None if there is none.
    """

    step: torch.cuda.CUDAGraph
    sample: torch.cuda.CUDAGraph | None = None
    update: torch.cuda.CUDAGraph | None = None


def _submitted(size: StepSize, stages: SamplerStages) -> SubmittedStep:
    """A step without sequences, for launches of the sampler."""
    return SubmittedStep(size, [0] * (size.num_chunks + 1), 0, stages, 0, None, None)
