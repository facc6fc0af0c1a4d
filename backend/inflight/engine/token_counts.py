"""What an engine counts from step to step."""

from __future__ import annotations

from dataclasses import dataclass

from inflight.core.batch import StepOutput
from inflight.engine.stats import Stats
from inflight.scheduling.scheduler import Scheduler


@dataclass(slots=True)
class TokenCounts:
    """What an engine's steps have computed.

    Attributes:
        num_steps: batches computed.
        num_drafted: drafts that were verified.
        num_accepted: those of them that were accepted.
    """

    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    def add(self, output: StepOutput) -> None:
        """A step was computed."""
        self.num_steps += 1
        for index, num_drafted in output.num_drafted.items():
            self.num_drafted += num_drafted
            self.num_accepted += len(output.token_ids[index]) - 1

    def snapshot(self, scheduler: Scheduler, num_blocks: int, num_output_tokens: int) -> Stats:
        """With what a scheduler counts and an output stage has counted."""
        return Stats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_suspended=len(scheduler.suspended),
            num_free_blocks=scheduler.num_free_blocks,
            num_blocks=num_blocks,
            num_steps=self.num_steps,
            num_preemptions=scheduler.num_preemptions,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_output_tokens=num_output_tokens,
            num_cached_tokens=scheduler.num_cached_tokens,
            num_drafted_tokens=self.num_drafted,
            num_accepted_tokens=self.num_accepted,
        )
