"""An engine's statistics."""

from __future__ import annotations

import msgspec


class Stats(msgspec.Struct, tag="stats", frozen=True):
    """A snapshot, taken between two steps; the counters count from the engine's start.

    Attributes:
        num_running, num_waiting, num_suspended: requests by state.
        num_free_blocks: KV blocks that are free or only cached.
        num_blocks: all of them.
        num_steps: batches computed.
        num_preemptions: how often a sequence was preempted.
        num_prompt_tokens, num_output_tokens: tokens of admitted prompts and of outputs.
        num_cached_tokens: prompt tokens found in the prefix cache.
        num_drafted_tokens: verified drafts.
        num_accepted_tokens: accepted drafts.
        num_waiting_by_class: waiting requests, in the order of PriorityClass.
        num_waiting_tokens_by_class: tokens of their prompts.
        num_refused_by_limit: requests refused by the queue, in the order of QUEUE_LIMITS.
        num_host_blocks: KV blocks in host memory.
        max_host_blocks: those that fit there.
        num_host_blocks_stored, num_host_blocks_loaded: blocks copied there, and back.
        num_host_blocks_evicted: blocks that others have replaced there.
        num_disk_blocks, max_disk_blocks, num_disk_blocks_written, num_disk_blocks_read: the same of
            disk.
    """

    num_running: int
    num_waiting: int
    num_suspended: int
    num_free_blocks: int
    num_blocks: int
    num_steps: int
    num_preemptions: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_waiting_by_class: list[int] = []
    num_waiting_tokens_by_class: list[int] = []
    num_refused_by_limit: list[int] = []
    num_host_blocks: int = 0
    max_host_blocks: int = 0
    num_host_blocks_stored: int = 0
    num_host_blocks_loaded: int = 0
    num_host_blocks_evicted: int = 0
    num_disk_blocks: int = 0
    max_disk_blocks: int = 0
    num_disk_blocks_written: int = 0
    num_disk_blocks_read: int = 0
