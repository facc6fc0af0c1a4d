"""Runs batches on a GPU, one step ahead of the host.

A step is put into the stream whole - its diffs, its forward pass, its choices - and the host goes
on to plan the next one. Steps in which each sequence computes one token replay a CUDA graph; those
with a chunk of a prompt are launched kernel by kernel, which takes less time than they do.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable

import torch

from inflight.batch import NOT_FINITE, NOTHING_LEFT, Batch, StepOutput
from inflight.checkpoint import Checkpoint
from inflight.config import EngineConfig
from inflight.device_batch import DeviceBatch, Sent
from inflight.errors import ConfigError
from inflight.model import CUDA_ARCHITECTURES
from inflight.model.config import ModelConfig
from inflight.model.kv_cache import KVCache
from inflight_kernels import batch_state, sampling
from inflight_kernels.compile import CompileError

logger = logging.getLogger(__name__)

_DTYPE = torch.bfloat16
# What a status of the sampler means to whoever sent the request.
_FAULTS = {sampling.NOT_FINITE: NOT_FINITE, sampling.NOTHING_LEFT: NOTHING_LEFT}

# Rows of the recorded steps. Between two of them the difference is computed for nothing, which
# costs most where there are few rows; many rows pay by the tile of 64.
_FEW_ROWS = (1, 2, 4)
_ROW_STEP = 8
_MANY_ROWS = 256
_MANY_ROW_STEP = 64

# Tokens per chunk: attention has kernels for few, some and many rows.
_WARM_UP_LENGTHS = (1, 2, 8, 64)


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Rows of the steps to record: ascending, the last one takes every decode step."""
    sizes = [size for size in _FEW_ROWS if size < max_num_seqs]
    sizes += range(_ROW_STEP, min(max_num_seqs, _MANY_ROWS), _ROW_STEP)
    sizes += range(_MANY_ROWS, max_num_seqs, _MANY_ROW_STEP)
    return [*sizes, max_num_seqs]


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
        model: ModelConfig,
        progress: Callable[[str, float], None],
    ) -> None:
        if not torch.cuda.is_available():
            raise ConfigError("device: no CUDA device is there, or torch is a build for CPUs")
        self.block_size = config.block_size
        self.vocab_size = model.vocab_size
        self.steps_ahead = 1
        self.timings: dict[str, float] = {}
        self._clock = time.perf_counter()
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._max_batch_tokens = config.max_batch_tokens
        max_len = model.max_model_len(config)
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            architecture = importlib.import_module(CUDA_ARCHITECTURES[model.architecture])
            try:
                self._model = architecture.Model(
                    checkpoint,
                    model,
                    _DTYPE,
                    max_len,
                    progress,
                    device=self._device,
                    max_tokens=config.max_batch_tokens,
                    max_chunks=config.max_num_seqs,
                    batch_invariant=config.batch_invariant,
                )
                self._batch = DeviceBatch(
                    config.max_num_seqs,
                    config.max_batch_tokens,
                    -(-max_len // self.block_size),
                    self.vocab_size,
                    self._device,
                )
                self._sampling = sampling.Workspace(
                    config.max_num_seqs, self.vocab_size, self._device
                )
                self._done("weights")
                self.num_blocks = model.num_blocks(config, self._free_bytes(config.gpu_memory))
                self._cache = KVCache(model, self.num_blocks, self.block_size, _DTYPE, self._device)
                self._done("kv cache")
                progress("kernels", 0.0)
                self._warm_up(config)
                self._done("kernels")
                self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
                if config.cuda_graphs:
                    self._record(graph_sizes(config.max_num_seqs), progress)
                self._done("graphs")
            except torch.OutOfMemoryError as error:
                raise ConfigError(
                    f"gpu_memory: the model does not fit the GPU ({error}); lower max_batch_tokens "
                    "or max_num_seqs"
                ) from None
            except CompileError as error:
                raise ConfigError(f"device: the kernels could not be compiled: {error}") from None
        logger.info(
            "%d KV blocks; seconds: %s",
            self.num_blocks,
            ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.timings.items()),
        )

    def launch(self, batch: Batch) -> _Step:
        num_chunks = len(batch.chunks)
        is_decode = batch.num_tokens == num_chunks
        num_rows = num_chunks
        if is_decode and self._graphs:
            num_rows = next(size for size in self._graphs if size >= num_chunks)
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            sent = self._batch.send(batch, num_rows, self._cache.data)
            if is_decode and self._graphs:
                self._graphs[num_rows].replay()
            else:
                self._forward(sent.num_tokens, num_chunks, sent.max_q_len)
            self._choose(sent)
            ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ended.record()
        return _Step(self._batch, batch, sent, ended)

    def _forward(self, num_tokens: int, num_rows: int, max_q_len: int) -> None:
        """Launch a step's kernels up to the logits of each row."""
        step, state = self._batch.step, self._batch.state
        batch_state.begin_step(step, state, num_rows, self.block_size)
        self._model.forward(step, state, num_tokens, num_rows, max_q_len, self._cache)

    def _choose(self, sent: Sent) -> None:
        """Launch the choice of tokens; what no row asks for is left out, so no graph holds it."""
        batch, num_rows = self._batch, sent.num_chunks
        step, state = batch.step, batch.state
        sampling.sample(
            self._model.logits[:num_rows],
            state.step_wishes[:num_rows].view(torch.uint8),
            state.sample_positions[:num_rows],
            self._sampling,
            token_ids=state.chosen[:num_rows],
            logprobs=state.logprobs[:num_rows],
            statuses=state.statuses[:num_rows],
            counts=batch.counts if sent.has_penalties else None,
            prompt=batch.prompt if sent.has_penalties else None,
            ban_starts=None if sent.bans is None else step.ban_starts[: num_rows + 1],
            bans=sent.bans,
            filters=sent.has_filters,
            pdl=True,
        )
        if sent.has_penalties:
            slots, chosen = state.count_slots[:num_rows], state.chosen[:num_rows]
            sampling.note_output(slots, chosen, batch.counts, pdl=True)
        batch_state.end_step(step, state, num_rows, pdl=True)

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
        self._batch.step.buffer.zero_()  # a step without chunks: no block is read or written
        self._batch.state.slot_mapping.fill_(-1)
        limit = min(config.max_batch_tokens, self.num_blocks * self.block_size)
        for rows in (1, 2, config.max_num_seqs):
            for q_len in (*_WARM_UP_LENGTHS, limit // rows):
                if 0 < rows * q_len <= limit:
                    self._forward(rows * q_len, rows, q_len)
        self._choose(Sent(1, 1, 1, 0, has_filters=True, has_penalties=True, bans=None))
        torch.cuda.synchronize(self._device)

    def _record(self, sizes: list[int], progress: Callable[[str, float], None]) -> None:
        """Record a decode step for each number of rows.

        Graphs share one pool of memory: only one of them runs at a time.
        """
        recorded: dict[int, torch.cuda.CUDAGraph] = {}
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(sizes):
            self._forward(size, size, 1)  # what is not compiled or loaded yet cannot be recorded
            torch.cuda.synchronize(self._device)
            # Not `torch.cuda.graph`, which collects garbage each time: seconds in all.
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                self._forward(size, size, 1)
            finally:
                graph.capture_end()
            recorded[size] = graph
            progress("graphs", len(recorded) / len(sizes))
        self._graphs = {size: recorded[size] for size in sizes}

    def _done(self, phase: str) -> None:
        now = time.perf_counter()
        self.timings[phase] = now - self._clock
        self._clock = now


class _Step:
    """A step in the stream (see `runner.PendingStep`)."""

    def __init__(
        self, device: DeviceBatch, batch: Batch, sent: Sent, ended: torch.cuda.Event
    ) -> None:
        self._device = device
        self._batch = batch
        self._sent = sent
        self._ended = ended

    def result(self) -> StepOutput:
        self._ended.synchronize()
        tokens, logprobs, statuses = self._device.results(self._sent)
        output = StepOutput([], [])
        for index, chunk in enumerate(self._batch.chunks):
            fine = chunk.samples and statuses[index] == sampling.FINE
            output.token_ids.append([tokens[index]] if fine else [])
            output.logprobs.append([logprobs[index]] if fine else [])
            if chunk.samples and not fine:
                output.errors[index] = _FAULTS[statuses[index]]
        return output
