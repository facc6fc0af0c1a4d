"""Detects reads of memory that a step of the GPU runner has not written.

All stale or uninitialised memory of a runner is poisoned: NaN, or numbers that are not a valid
token, slot or block. Block tables are kept: entries past their ends are read but not used.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from inflight.execution.batch.device_batch import RING, DeviceBatch, SubmittedStep
from inflight.execution.cuda_runner import CudaRunner

_UNFIT = (-7, 1, 123_456_789, 0x3FFFFFFF)


def poison_steps(monkeypatch: pytest.MonkeyPatch, generator: random.Random) -> None:
    """Before each step, poison what goes to the device, and what the device derives from it."""
    send = DeviceBatch.send

    def poisoned(batch: DeviceBatch, *operands: Any, **settings: Any) -> SubmittedStep:
        unfit, state = generator.choice(_UNFIT), batch.state
        ring_index = (batch._ring_index + 1) % RING
        batch._host[ring_index].fill(unfit)
        state.results[ring_index].fill_(unfit)
        state.logprobs.fill_(float("nan"))
        for values in (
            batch.step.buffer,
            state.token_ids,
            state.positions,
            state.slot_mapping,
            state.seq_lens,
            state.sample_rows,
            state.sample_positions,
            state.step_row_params,
            state.tail_starts,
            state.tail_lengths,
            state.count_slots,
            state.chosen,
            state.statuses,
        ):
            values.fill_(unfit)
        return send(batch, *operands, **settings)

    monkeypatch.setattr(DeviceBatch, "send", poisoned)


@torch.inference_mode()
def poison_memory(runner: CudaRunner) -> None:
    """Fill the KV caches and a model's activations, which are not in use yet, with NaN."""
    model = runner._steps.model
    owners = (model, model._residual, model._last)
    activations = [value for owner in owners for value in vars(owner).values()]
    for values in (*runner._steps.caches, *activations):
        if isinstance(values, Tensor) and values.is_floating_point():
            values.fill_(float("nan"))
