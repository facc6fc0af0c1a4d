"""Launches of a model's steps on a GPU, and their memory."""

from __future__ import annotations

from collections.abc import Callable

import torch

from inflight.checkpoint.locate import Checkpoint
from inflight.config import EngineConfig
from inflight.core.step_size import StepSize
from inflight.execution.batch.device_batch import BatchLimits, DeviceBatch, SubmittedStep
from inflight.execution.batch.step_upload import SamplerStages
from inflight.execution.batch.top_logprobs import TopLogprobs
from inflight.execution.drafters.drafter import DeviceDrafter, DeviceTarget
from inflight.execution.drafters.drafter_spec import DrafterSpec, kv_layout
from inflight.kv.cache import KVCache
from inflight.models.decoder_cuda import Decoder, DecoderSettings
from inflight.models.layers.attention import ForwardInputs, TableInputs
from inflight.models.spec import ModelSpec
from inflight.sampling.logit_adjustments import BANNED
from inflight_kernels.ops import batch_state, sampling


class DeviceSteps:
    """Launches steps: forward pass, sampling, and the drafter's work.

    Args:
        config: the engine's settings.
        checkpoint: the model's.
        spec: of the model.
        source: of the drafter; None for none.
        settings: of the model. On torch's meta device nothing is allocated, and steps can only be
            recorded (see `inflight_kernels.runtime.recording.record_launches`).
        progress: called with what is loading and the loaded fraction.

    Attributes:
        model: on the device.
        batch: slots of sequences.
        top_logprobs: of the steps.
        drafter: None if nothing is drafted on the device.
        caches: all caches in which blocks are copied; set by `allocate`.

    Raises:
        ConfigError: the weights are corrupt or do not match the spec, or its shape is not supported
            on GPUs.
    """

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        spec: ModelSpec,
        source: DrafterSpec | None,
        settings: DecoderSettings,
        progress: Callable[[str, float], None],
    ) -> None:
        self._config = config
        self._source = source
        self._settings = settings
        device, max_rows = settings.device, settings.max_rows
        speculation = config.speculative_config
        max_drafts = speculation.num_speculative_tokens if speculation else 0
        self.model = Decoder(checkpoint, spec, settings, progress)
        self._kv_layout = kv_layout(spec, source, settings.kv_dtype)
        limits = BatchLimits(
            config.max_num_seqs,
            config.max_num_batched_tokens,
            -(-settings.max_len // config.block_size),
            max_rows,
            max_drafts,
            settings.max_len if source is not None and source.method.needs_history else 0,
            len(self._kv_layout.tables),
        )
        self.batch = DeviceBatch(limits, spec.vocab_size, device)
        step, state = self.batch.step, self.batch.state
        self._rows = ForwardInputs(
            state.token_ids,
            state.positions,
            step.query_start,
            state.seq_lens,
            tuple(TableInputs(one.slot_mapping, one.step_tables) for one in state.by_table),
            state.sample_rows,
            step.num_tokens,
        )
        self._workspace = sampling.Workspace(max_rows, spec.vocab_size, device)
        self.top_logprobs = TopLogprobs(max_rows, self._workspace, device)
        self.drafter: DeviceDrafter | None = None
        if source is not None:
            target = DeviceTarget(
                self.model,
                self._rows,
                self.batch,
                self._workspace,
                config,
                settings,
                max_drafts,
                progress,
            )
            self.drafter = source.method.load_on_device(source, target)

    def allocate(self, num_blocks: int) -> None:
        """Allocate the KV pool, and the drafter's caches.

        Args:
            num_blocks: of the pool.

        Raises:
            ConfigError: out of memory.
        """
        num_scratch, block_size = 0, self._config.block_size
        if self._source is not None and self._source.method.shares_target_kv:
            num_scratch = self._config.max_num_seqs
        num_all, device = num_blocks + num_scratch, self._settings.device
        self._cache = KVCache(self._kv_layout, num_all, block_size, device)
        self.batch.kernel_blocks = self._cache.kernel_blocks
        self.caches = list(self._cache.data)
        if self.drafter is not None:
            self.drafter.allocate(self._cache, num_blocks)
            self.caches += [data for cache in self.drafter.caches for data in cache.data]

    def forward(self, size: StepSize, num_layers: int | None = None) -> None:
        """Launch a step's kernels up to the logits; num_layers as for `Decoder.forward`."""
        step, state = self.batch.step, self.batch.state
        block_size = self._config.block_size
        batch_state.begin_step(
            step, state, size.num_chunks, block_size, size.num_tokens, size.num_rows
        )
        self.model.forward(self._rows, size, self._cache, num_layers)
        if self.drafter is not None:
            self.drafter.forward(size)

    def update_drafter(self, size: StepSize) -> None:
        """Launch the drafter's work after a step's tokens are sampled."""
        assert self.drafter is not None
        self.drafter.update(size)

    def sample(self, sent: SubmittedStep) -> None:
        """Launch the sampler, without the stages that no row needs; hence it is not in a graph."""
        batch, num_rows, stages = self.batch, sent.size.num_rows, sent.stages
        step, state, logits = batch.step, batch.state, self.model.logits[:num_rows]
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
            self._workspace,
            sampled,
            filters=bool(stages & (SamplerStages.FILTERS | SamplerStages.RARE_FILTERS)),
            rare=SamplerStages.RARE_FILTERS in stages,
            pdl=True,
        )
        if SamplerStages.TOP_LOGPROBS in stages:
            if sent.bans is not None:
                banned = torch.full((), BANNED, dtype=logits.dtype, device=logits.device)
                # Only now: the sampler needs the logits as they were.
                logits.index_put_(sent.bans, banned)
            self.top_logprobs.launch(logits, step, sampled, sent.ring_index)
        batch_state.end_step(step, state, sent.size.num_chunks, pdl=True)
        if penalties:
            slots = state.count_slots[:num_rows]
            sampling.count_output_tokens(slots, sampled.token_ids, batch.counts, pdl=True)
