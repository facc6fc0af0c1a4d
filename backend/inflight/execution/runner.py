"""How a batch runs on a device: the seam between the scheduler's counts and a model's numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from inflight.core.batch import Batch, StepOutput
from inflight.core.sequence import Sequence
from inflight.kv.layout import KVTables
from inflight.scheduling.draft_budget import StepCosts


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Host memory for KV blocks.

    Attributes:
        slots: [slots, bytes of a block].
        fingerprint: see `kv.tiers.fingerprint`.
        min_tokens: fewer tokens of a prefix are computed sooner than they are loaded.
    """

    slots: npt.NDArray[np.uint8]
    fingerprint: str = ""
    min_tokens: int = 1


class PendingStep(Protocol):
    """A batch that was launched."""

    def result(self) -> StepOutput:
        """Wait for the step and return its output; called once, oldest step first.

        Failures of a single sequence are in the output's `errors`; an exception means that the
        whole step failed.
        """


class Runner(Protocol):
    """Turns batches into tokens.

    Attributes:
        num_blocks: KV blocks in its pool.
        block_size: tokens per kernel block.
        kv_tables: the block tables of each sequence.
        host_memory: where the stores and loads of batches are; None without.
        vocab_size: token ids are below it.
        max_rows: rows of logits in a step: one per sequence and one per draft; prompts whose
            logprobs are requested share the rest.
        steps_ahead: steps that may be launched before the previous result is processed. With 0 all
            tokens of a launched batch are committed.
        step_costs: step times, if it has a drafter; None without one, and then no chunk has drafts.
        supports_host_drafts: whether sequences that need committed tokens may have drafts.
        gpu_budget_bytes: GPU memory that it may use; 0 on a CPU.
    """

    num_blocks: int
    block_size: int
    kv_tables: KVTables
    host_memory: HostMemory | None
    vocab_size: int
    max_rows: int
    steps_ahead: int
    step_costs: StepCosts | None
    supports_host_drafts: bool
    gpu_budget_bytes: int

    def launch(self, batch: Batch) -> PendingStep:
        """Load, store and copy blocks, draft, compute the batch, sample.

        Batches run in launch order. Everything a step needs of its sequences (tokens, block tables)
        is read here; the host changes them afterwards.

        Raises:
            Exception: the whole step failed, as in `PendingStep.result`.
        """

    def take_stored(self) -> list[int]:
        """Tickets of the batches' stores that have ended since the last call (see `Batch`)."""

    def forget(self, sequence: Sequence) -> None:
        """Drop the state of a finished sequence; idempotent."""
