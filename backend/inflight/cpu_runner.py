"""Runs batches on the CPU: a model's forward pass, then each sequence's own choice of token."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from inflight.batch import NOT_FINITE, NOTHING_LEFT, Batch, BatchArrays, Chunk, Done, StepOutput
from inflight.checkpoint import Checkpoint
from inflight.config import EngineConfig
from inflight.model import ARCHITECTURES
from inflight.model.config import ModelConfig
from inflight.model.kv_cache import KVCache
from inflight.sequence import Sequence
from inflight_kernels import reference as ops

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

UNKNOWN_TOKEN = "numerical: a token id is outside the model's vocabulary"


class CpuRunner:
    """One model on the CPU with its KV pool (see `runner.Runner`).

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
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        self.num_blocks = model.num_blocks(config)
        self.block_size = config.block_size
        self.vocab_size = model.vocab_size
        self.steps_ahead = 0
        self._dtype = _DTYPES[config.dtype]
        self._cache = KVCache(model, self.num_blocks, self.block_size, self._dtype)
        architecture = importlib.import_module(ARCHITECTURES[model.architecture])
        self._model = architecture.Model(
            checkpoint, model, self._dtype, model.max_model_len(config), progress
        )

    def launch(self, batch: Batch) -> Done:
        return Done(self._run(batch))

    @torch.inference_mode()
    def _run(self, batch: Batch) -> StepOutput:
        output = StepOutput([[] for _ in batch.chunks], [[] for _ in batch.chunks])
        if batch.copies:
            sources, targets = torch.tensor(batch.copies).unbind(1)
            ops.copy_blocks(self._cache.data, sources, targets)
        if not batch.chunks:
            return output
        arrays = batch.arrays(self.block_size)
        self._clear_tails(batch)
        self._refuse_unknown_tokens(arrays, output)
        plan = ops.plan_attention(
            arrays.block_tables, arrays.query_start, arrays.seq_lens, self.block_size, self._dtype
        )
        logits = self._model.forward(
            torch.from_numpy(arrays.token_ids),
            torch.from_numpy(arrays.positions),
            torch.from_numpy(arrays.slot_mapping),
            plan,
            torch.from_numpy(arrays.sample_rows),
            self._cache,
        )
        if len(logits):
            self._choose(batch, logits, output)
        return output

    def _clear_tails(self, batch: Batch) -> None:
        """Zero what earlier users left behind a sequence's end in blocks that are new to it."""
        copied = {target for _, target in batch.copies}
        size = self.block_size
        slots: list[int] = []
        for chunk in batch.chunks:
            offset = chunk.end % size
            if not offset:
                continue
            index = chunk.end // size
            block = chunk.sequence.blocks[index]
            if chunk.start <= index * size or block in copied:
                slots.extend(range(block * size + offset, (block + 1) * size))
        if slots:
            ops.clear_slots(self._cache.data, torch.tensor(slots))

    def _refuse_unknown_tokens(self, arrays: BatchArrays, output: StepOutput) -> None:
        ids = arrays.token_ids
        bad = (ids < 0) | (ids >= self.vocab_size)
        if bad.any():
            rows = np.flatnonzero(bad)
            for index in np.searchsorted(arrays.query_start, rows, side="right") - 1:
                output.errors[int(index)] = UNKNOWN_TOKEN
            ids[bad] = 0

    def _choose(self, batch: Batch, logits: Tensor, output: StepOutput) -> None:
        """Choose a token for each row of logits [s, V], which it changes."""
        rows = [index for index, chunk in enumerate(batch.chunks) if chunk.samples]
        logprobs = ops.log_probs(logits)
        finite = ops.finite_rows(logits).tolist()
        shaped = []
        for row, index in enumerate(rows):
            if not finite[row]:
                output.errors.setdefault(index, NOT_FINITE)
            elif _shape(logits[row], batch.chunks[index].sequence):
                shaped.append(row)
        for row in shaped:
            if bool(logits[row].amax() == float("-inf")):
                output.errors.setdefault(rows[row], NOTHING_LEFT)
        good = [row for row, index in enumerate(rows) if index not in output.errors]
        drawn = [
            row
            for row in good
            if batch.chunks[rows[row]].sequence.request.params.effective_temperature > 0.0
        ]
        chosen = torch.zeros(len(rows), dtype=torch.int64)
        if len(drawn) < len(good):
            chosen = ops.greedy(logits)
        if drawn:
            picks = _draw(logits[drawn], [batch.chunks[rows[row]] for row in drawn])
            chosen[drawn] = picks
        token_ids = chosen.tolist()
        values = logprobs.gather(1, chosen.unsqueeze(1)).squeeze(1).tolist()
        for row in good:
            output.token_ids[rows[row]].append(token_ids[row])
            output.logprobs[rows[row]].append(values[row])


def _shape(row: Tensor, sequence: Sequence) -> bool:
    """Apply penalties and masks to logits [V] in place; whether any token may be masked."""
    params = sequence.request.params
    vocab_size = len(row)
    if params.has_penalties:
        prompt_len = sequence.num_prompt_tokens
        tokens = np.array(sequence.token_ids, np.int64)
        output_ids, counts = np.unique(tokens[prompt_len:], return_counts=True)
        ops.apply_penalties(
            row,
            np.unique(tokens),
            output_ids,
            counts,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
    banned = sequence.banned_tokens(sequence.num_output_tokens)
    banned = [token_id for token_id in banned if 0 <= token_id < vocab_size]
    if banned:
        ops.ban_tokens(row, banned)
    return bool(banned)


def _draw(logits: Tensor, chunks: list[Chunk]) -> Tensor:
    """Draw for each chunk's sequence from its row of logits [n, V] -> [n]."""
    params = [chunk.sequence.request.params for chunk in chunks]
    return ops.draw(
        logits,
        np.array([p.effective_temperature for p in params]),
        np.array([p.top_k for p in params], np.int64),
        np.array([p.top_p for p in params]),
        np.array([p.min_p for p in params]),
        # The position of the token drawn: a sequence that is preempted and computed anew, or
        # stands in another batch, draws the same.
        np.array([ops.uniform(chunk.sequence.seed, chunk.end) for chunk in chunks]),
    )
