"""Finds the kernels that an engine will launch, before its weights are loaded: its steps are run
once without memory, and their launches are recorded."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import torch

from inflight.checkpoint.locate import Checkpoint
from inflight.config import EngineConfig
from inflight.core.batch import Batch, Chunk
from inflight.core.request import Request
from inflight.core.sequence import Sequence
from inflight.core.step_size import StepSize
from inflight.errors import ConfigError
from inflight.execution.batch.step_upload import SamplerStages
from inflight.execution.device_steps import DeviceSteps
from inflight.execution.drafters.drafter_spec import DrafterSpec
from inflight.execution.graphs.buckets import capture_sizes, prompt_key_counts, row_counts
from inflight.models.decoder_cuda import DecoderSettings
from inflight.models.spec import ModelSpec
from inflight.sampling.params import SamplingParams
from inflight_kernels.runtime.recording import record_launches

logger = logging.getLogger(__name__)

_META = torch.device("meta")

# Attention takes another kernel in narrow ranges of few sequences: each number of them is recorded.
_MAX_EACH_COUNT = 64

# Which kernel multiplies by a weight depends on the tiles that the tokens of a step fill.
_TILE_TOKENS = 128


def find_kernels(
    config: EngineConfig,
    checkpoint: Checkpoint,
    spec: ModelSpec,
    source: DrafterSpec | None,
    settings: DecoderSettings,
) -> list[tuple[str, str]]:
    """Stem and name of the kernels that an engine may launch on the current device, those that
    take longest to compile first. None, after a warning, where the recording fails: kernels are
    then compiled when they are first launched.

    No other thread may launch kernels meanwhile.

    Args:
        config: the engine's settings.
        checkpoint: of the model; no weight is read.
        spec: of the model.
        source: of the drafter; None for none.
        settings: of the model.

    Raises:
        ConfigError: the shape of the model or of its drafter is not supported on GPUs.
    """
    if source is not None and source.model is not None:
        source = replace(source, model=_shortened(source.model))
    on_meta = replace(settings, device=_META)
    try:
        with record_launches() as launched, torch.inference_mode():
            steps = DeviceSteps(
                config, checkpoint, _shortened(spec), source, on_meta, lambda what, done: None
            )
            steps.allocate(1)
            _run(steps, config, on_meta)
    except ConfigError:
        raise
    except Exception:  # whatever it is: the recording only saves time, and a start needs none
        logger.warning(
            "the kernels could not be found ahead of their launches; the start takes longer, for "
            "they are compiled one by one",
            exc_info=True,
        )
        return []
    return list(launched)


def _shortened(spec: ModelSpec) -> ModelSpec:
    """With one of each kind of layer, and the last one, which computes less than the others."""
    return replace(spec, layers=(*dict.fromkeys(spec.layers[:-1]), spec.layers[-1]))


def _run(steps: DeviceSteps, config: EngineConfig, settings: DecoderSettings) -> None:
    """Launch what steps of any size may launch, the sampler first: it takes longest to compile."""
    every = SamplerStages(sum(need.value for need in SamplerStages))
    sequence = Sequence(Request(0, [0], SamplingParams(repetition_penalty=1.1)), 1)
    sequence.tables = [[0] for _ in steps.batch.kernel_blocks]
    sequence.capacity = 1
    batch, drafter = Batch([Chunk(sequence, 0, 1, True)], [(0, 0)]), steps.drafter
    sent = steps.batch.send(batch, StepSize(1, 1, 1, 1), *steps.caches)
    steps.sample(replace(sent, stages=every))
    for size in _sizes(config, settings, steps.model.spec):
        steps.forward(size)
        if drafter is not None:
            steps.update_drafter(size)
    if drafter is not None:
        # If it takes features of the last of these few layers, that has had all rows so far.
        full = config.max_num_batched_tokens
        steps.forward(StepSize(full, 1, 1, full), steps.model.spec.num_layers)
        most = config.max_num_seqs
        for chunks in sorted({*_few(most), *row_counts(most)}):
            drafter.draft(steps.batch, chunks, 2)  # the passes after the first are alike


def _sizes(config: EngineConfig, settings: DecoderSettings, spec: ModelSpec) -> Iterator[StepSize]:
    """Of steps that between them launch each kernel that any step launches."""
    most, most_tokens = config.max_num_seqs, config.max_num_batched_tokens
    max_rows, speculation = settings.max_rows, config.speculative_config
    max_drafts = speculation.num_speculative_tokens if speculation else 0
    layer_weights = spec.matrix_elements_per_layer
    limits = (most, max_rows, max_drafts, most_tokens)
    yield from capture_sizes(*limits, layer_weights, settings.max_prompt_keys)
    for chunks in _few(most):
        yield StepSize(chunks, chunks, chunks, 1)
    for chunks in sorted({1, min(2, most), most}):
        limit = most_tokens // chunks
        # Twice as many rows at a time meet every kernel: each is for a 4-fold range of them.
        for q_len in (*(1 << power for power in range(limit.bit_length())), limit):
            for prompt_keys in prompt_key_counts(settings.quantized_kv):
                yield StepSize(chunks * q_len, chunks, chunks, q_len, prompt_keys)
    full = {*range(_TILE_TOKENS, most_tokens, _TILE_TOKENS), most_tokens}
    # A token more than a tile holds leaves another one nearly empty, which is cuBLAS's work.
    for num_tokens in sorted(full | {min(_TILE_TOKENS + 1, most_tokens)}):
        yield StepSize(num_tokens, 1, 1, num_tokens)
        num_chunks, num_rows = min(num_tokens, most), min(num_tokens, max_rows)
        yield StepSize(num_tokens, num_chunks, num_rows, num_tokens)


def _few(most: int) -> range:
    """Numbers of sequences that are recorded one by one."""
    return range(1, min(most, _MAX_EACH_COUNT) + 1)
