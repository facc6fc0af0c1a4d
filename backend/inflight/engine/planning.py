"""Creates an engine's scheduler and its budgets from its settings and its runner."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from inflight.config import EngineConfig
from inflight.core.request import AUTO_DRAFTS, PriorityClass
from inflight.execution.runner import Runner
from inflight.kv.settings import KVSettings
from inflight.kv.tiers.disk_cache import DiskCache
from inflight.kv.tiers.host_cache import HostTier
from inflight.scheduling.draft_budget import DraftBudget
from inflight.scheduling.kv_forecast import KVForecast
from inflight.scheduling.prefill_budget import PrefillBudget
from inflight.scheduling.scheduler import Scheduler
from inflight.scheduling.step_limits import StepLimits
from inflight.scheduling.waiting_queue import WaitingQueue


def make_prefill_budget(config: EngineConfig) -> PrefillBudget | None:
    """The prefill budget; None without a target ITL."""
    itl_ms, ttft_ms = config.itl_target_ms, config.ttft_target_ms
    if itl_ms is None:
        return None
    return PrefillBudget(itl_ms / 1e3, None if ttft_ms is None else ttft_ms / 1e3)


def make_scheduler(
    config: EngineConfig,
    runner: Runner,
    prefill_budget: PrefillBudget | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Scheduler:
    """The scheduler of the runner's KV blocks, and its queue."""
    weights = {
        PriorityClass.INTERACTIVE: config.interactive_weight,
        PriorityClass.BATCH: config.batch_weight,
    }
    return Scheduler(
        KVSettings(
            num_blocks=runner.num_blocks,
            block_size=runner.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            tables=runner.kv_tables,
            host_tier=make_host_tier(config, runner),
        ),
        StepLimits(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_prefill_chunk=config.max_prefill_chunk,
            max_draft_tokens=config.max_draft_tokens,
            max_rows=runner.max_rows,
        ),
        waiting=WaitingQueue(weights, config.max_waiting, config.max_waiting_tokens),
        prefill_budget=prefill_budget,
        forecast=_make_forecast(config, runner),
        clock=clock,
    )


def _make_forecast(config: EngineConfig, runner: Runner) -> KVForecast | None:
    """The forecast of the pool's usage; None if nothing is to be kept free for it."""
    max_blocks = int(config.kv_growth_reserve * runner.num_blocks)
    if not max_blocks:
        return None
    return KVForecast(runner.kv_tables, config.max_num_seqs, max_blocks)


def make_host_tier(config: EngineConfig, runner: Runner) -> HostTier | None:
    """The tiers of the prefix cache below the pool; None without.

    Raises:
        ConfigError: see `DiskCache`.
    """
    memory, disk = runner.host_memory, None
    if memory is None:
        return None
    if config.kv_disk_dir is not None and config.kv_disk_bytes is not None:
        folder = Path(config.kv_disk_dir)
        disk = DiskCache(folder, memory.fingerprint, config.kv_disk_bytes, memory.slots)
    return HostTier(len(memory.slots), memory.min_tokens, disk)


def make_draft_budget(config: EngineConfig, runner: Runner) -> DraftBudget | None:
    """The draft budget; None without speculative decoding."""
    settings = config.speculative_config
    if settings is None or runner.step_costs is None:
        return None
    default = {"auto": AUTO_DRAFTS, "off": 0}.get(str(settings.default))
    return DraftBudget(
        runner.step_costs,
        settings.num_speculative_tokens,
        int(settings.default) if default is None else default,
        host_drafts=runner.supports_host_drafts,
    )
