"""Token counters of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from inflight.config import MAX_DRAFTS
from inflight.core.batch import StepOutput
from inflight.engine.stats import Stats
from inflight.kv.tiers.host_cache import HostCache
from inflight.scheduling.scheduler import Scheduler


@dataclass(slots=True)
class TokenCounts:
    """Counters over an engine's steps.

    Attributes:
        num_steps: batches computed.
        num_drafted: verified drafts.
        num_accepted: accepted drafts.
        num_accepted_at: verifications of drafts, by the number of those accepted.
        from_outputs: (drafted, accepted) of those that are from outputs of earlier requests.
    """

    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_accepted_at: list[int] = field(default_factory=lambda: [0] * (1 + MAX_DRAFTS))
    from_outputs: tuple[int, int] = (0, 0)

    def add(self, output: StepOutput) -> None:
        """Record a computed step."""
        self.num_steps += 1
        for index, num_drafted in output.num_drafted.items():
            num_accepted = len(output.token_ids[index]) - 1
            self.num_drafted += num_drafted
            self.num_accepted += num_accepted
            self.num_accepted_at[num_accepted] += 1
            if index in output.from_outputs:
                drafted, accepted = self.from_outputs
                self.from_outputs = (drafted + num_drafted, accepted + num_accepted)

    def snapshot(self, scheduler: Scheduler, num_blocks: int, num_output_tokens: int) -> Stats:
        """A snapshot, with the counters of scheduler and output stage."""
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
            num_waiting_by_class=list(scheduler.waiting.num_requests.values()),
            num_waiting_tokens_by_class=list(scheduler.waiting.num_tokens.values()),
            num_refused_by_limit=list(scheduler.waiting.num_refused.values()),
            **_of_tiers(scheduler.host_cache),
        )


def _of_tiers(host: HostCache | None) -> dict[str, int]:
    """What `Stats` says of host memory and disk."""
    if host is None:
        return {}
    found = {
        "num_host_blocks": len(host),
        "max_host_blocks": host.num_slots,
        "num_host_blocks_stored": host.num_stored,
        "num_host_blocks_loaded": host.num_loaded,
        "num_host_blocks_evicted": host.num_evicted,
    }
    if host.disk is None:
        return found
    return found | {
        "num_disk_blocks": len(host.disk),
        "max_disk_blocks": host.disk.num_slots,
        "num_disk_blocks_written": host.disk.num_written,
        "num_disk_blocks_read": host.disk.num_read,
    }
