"""How a batch runs on a device: the seam between the scheduler's counts and a model's numbers."""

from __future__ import annotations

from typing import Protocol

from inflight.core.batch import Batch, StepOutput
from inflight.core.sequence import Sequence
from inflight.scheduling.draft_budget import StepCosts


class PendingStep(Protocol):
    """A batch that was launched."""

    def result(self) -> StepOutput:
        """Wait for the step and return what it chose; called once, oldest step first.

        What fails for one sequence alone is in the output's `errors`; an exception means that the
        runner itself is broken.
        """


class Runner(Protocol):
    """Turns batches into tokens.

    Attributes:
        num_blocks: KV blocks in its pool.
        block_size: tokens per block.
        vocab_size: token ids are below it.
        max_rows: rows of logits in a step. Each sequence takes one and each draft another one;
            prompts whose log-probabilities are wanted share what is left.
        steps_ahead: steps that may be launched before the result of the one before them is taken.
            With 0 the host knows all tokens of a batch that it launches.
        step_costs: what steps take, if it has a drafter; None if it has none, and then no chunk may
            have drafts.
        supports_host_drafts: whether chunks of sequences that need the host may have drafts.
    """

    num_blocks: int
    block_size: int
    vocab_size: int
    max_rows: int
    steps_ahead: int
    step_costs: StepCosts | None
    supports_host_drafts: bool

    def launch(self, batch: Batch) -> PendingStep:
        """Copy the batch's blocks, draft tokens, compute the batch's, choose the next ones.

        Batches are computed in the order of their launches. All that a step needs of its sequences
        (tokens, block tables) is read here: the host goes on to change them.

        Raises:
            Exception: the runner is broken, as in `PendingStep.result`.
        """

    def forget(self, sequence: Sequence) -> None:
        """A sequence has ended: drop what is kept of it; idempotent."""
