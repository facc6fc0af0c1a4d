"""The table of metrics: each family once. Everything that shows metrics is derived from it.

A published name is `inflight_`, the stem, and `_total` for a counter. Stems, buckets and the labels
`model_name` and `engine` are those of vLLM, so that replacing `vllm:` with `inflight_` converts a
dashboard. Where vLLM's first bucket is too coarse, finer ones precede it.

Aliases are published on request: under vLLM's names, and under those of Triton's TensorRT-LLM
backend.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from inflight.config import MAX_DRAFTS
from inflight.core.request import PriorityClass
from inflight.errors import KINDS, ConfigError, did_you_mean
from inflight.scheduling.waiting_queue import QUEUE_LIMITS

PREFIX = "inflight_"
FLAVOURS = ("vllm", "trtllm")
"""The servers under whose names metrics can be published, too."""

COMPAT_VARIABLE = "INFLIGHT_METRICS_COMPAT"
"""The environment variable that lists them for all models of a server."""

LABELS = ("model_name", "engine", "model", "version")
"""Of every series: the checkpoint's name, the engine's number, and Triton's model and version."""
TRTLLM_LABELS = ("model", "version")

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Alias:
    """Another name of a family, or of one series of it.

    Attributes:
        flavour: whose name it is, one of FLAVOURS.
        name: in full, without the suffix of a histogram's series.
        labels: constant labels that select it in a family that it shares with others.
        of: the values of the one series that it stands for; None for all of the family.
    """

    flavour: str
    name: str
    labels: tuple[tuple[str, str], ...] = ()
    of: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """Series of one name.

    Attributes:
        stem: the name without prefix and suffix.
        kind: counters never decrease, except that a new server starts at 0.
        meaning: a sentence.
        labels: its own labels.
        values: of those labels, for each of its series.
        bounds: of a histogram's buckets: inclusive upper bounds, ascending; a last bucket takes
            what exceeds them.
        facts: labels of a gauge that is always 1, and the stems of the gauges with their values.
        aliases: its other names.
    """

    stem: str
    kind: Kind
    meaning: str
    labels: tuple[str, ...] = ()
    values: tuple[tuple[str, ...], ...] = ((),)
    bounds: tuple[float, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    aliases: tuple[Alias, ...] = ()

    @property
    def name(self) -> str:
        """As published; a histogram's series append _bucket, _sum and _count."""
        return PREFIX + self.stem + ("_total" if self.kind == "counter" else "")


def _vllm(name: str) -> Alias:
    return Alias("vllm", f"vllm:{name}")


def _trtllm(group: str, label: str, value: str, of: str = "") -> Alias:
    return Alias("trtllm", f"nv_trt_llm_{group}", ((label, value),), (of,) if of else None)


def _request_type(value: str) -> Alias:
    return _trtllm("request_metrics", "request_type", value)


def _kv_block_type(value: str, of: str = "") -> Alias:
    return _trtllm("kv_cache_block_metrics", "kv_cache_block_type", value, of)


# fmt: off
_FIRST_TOKEN_S = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0,
    7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)
_TOKEN_S = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)
_REQUEST_S = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0,
    30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)
_STEP_S = (
    0.0005, 0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.012, 0.016, 0.024, 0.032, 0.064, 0.128,
    0.256, 0.512, 1.0, 2.5, 10.0,
)
_NUM_TOKENS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000,
)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)
# fmt: on

FINISHED_REASONS = ("stop", "length", "abort", "error")
ERROR_KINDS = tuple(sorted(KINDS))
PHASES = ("decode", "prefill")
FRONT, ENGINE = "front", "engine"
QUEUED, STARTED = DEADLINE_STATES = ("queued", "started")


def _each(values: Iterable[str]) -> tuple[tuple[str], ...]:
    return tuple((value,) for value in values)


FAMILIES: tuple[Family, ...] = (
    Family(
        "num_requests_running",
        "gauge",
        "Requests that are computed.",
        aliases=(_vllm("num_requests_running"), _request_type("scheduled")),
    ),
    Family(
        "num_requests_waiting",
        "gauge",
        "Requests in the queue, preempted ones included.",
        aliases=(_vllm("num_requests_waiting"), _request_type("waiting")),
    ),
    Family(
        "num_requests_queued",
        "gauge",
        "The same by priority class.",
        ("priority_class",),
        _each(PriorityClass),
    ),
    Family(
        "num_prompt_tokens_queued",
        "gauge",
        "Prompt tokens of the requests in the queue, by priority class.",
        ("priority_class",),
        _each(PriorityClass),
    ),
    Family(
        "num_requests_suspended",
        "gauge",
        "Requests whose consumer has stopped reading.",
    ),
    Family(
        "num_requests_active",
        "gauge",
        "Requests that are running, waiting or suspended.",
        aliases=(_request_type("active"),),
    ),
    Family(
        "max_num_seqs",
        "gauge",
        "Sequences that can run at a time.",
        aliases=(_request_type("max"),),
    ),
    Family(
        "kv_cache_usage_perc",
        "gauge",
        "KV blocks in use, as a fraction from 0 to 1; cached ones that nothing uses are free.",
        aliases=(_vllm("kv_cache_usage_perc"), _kv_block_type("fraction")),
    ),
    Family(
        "kv_cache_blocks",
        "gauge",
        "KV blocks by state.",
        ("state",),
        _each(("free", "used")),
        aliases=(_kv_block_type("free", "free"), _kv_block_type("used", "used")),
    ),
    Family(
        "kv_cache_max_blocks",
        "gauge",
        "KV blocks in the pool.",
        aliases=(_kv_block_type("max"),),
    ),
    Family(
        "kv_cache_block_size",
        "gauge",
        "Tokens per KV block.",
        aliases=(_kv_block_type("tokens_per"),),
    ),
    Family(
        "kv_host_max_blocks",
        "gauge",
        "KV blocks that host memory holds (`kv_host_memory_bytes`).",
    ),
    Family("kv_host_blocks", "gauge", "KV blocks in host memory."),
    Family("kv_host_blocks_stored", "counter", "KV blocks copied to host memory."),
    Family(
        "kv_host_blocks_loaded",
        "counter",
        "KV blocks copied from host memory instead of being computed again.",
    ),
    Family(
        "kv_host_blocks_evicted",
        "counter",
        "KV blocks in host memory that others have replaced.",
    ),
    Family(
        "kv_disk_max_blocks",
        "gauge",
        "KV blocks that fit on disk (`kv_disk_bytes`).",
    ),
    Family("kv_disk_blocks", "gauge", "KV blocks on disk."),
    Family("kv_disk_blocks_written", "counter", "KV blocks written to disk."),
    Family("kv_disk_blocks_read", "counter", "KV blocks read from disk."),
    Family(
        "cache_config_info",
        "gauge",
        "1; the labels describe the KV cache.",
        facts=(("block_size", "kv_cache_block_size"), ("num_gpu_blocks", "kv_cache_max_blocks")),
        aliases=(_vllm("cache_config_info"),),
    ),
    Family(
        "saturation",
        "gauge",
        "The larger of KV use and waiting requests per sequence that can run: scale out near 1.",
    ),
    Family("engine_up", "gauge", "1 while the engine runs, 0 while it is replaced."),
    Family("engine_restarts", "counter", "Engines that have replaced an earlier one."),
    Family(
        "engine_steps",
        "counter",
        "Steps computed.",
        aliases=(_trtllm("general_metrics", "general_type", "iteration_counter"),),
    ),
    Family(
        "prompt_tokens",
        "counter",
        "Tokens of prompts, counted when they are first admitted.",
        aliases=(_vllm("prompt_tokens_total"),),
    ),
    Family(
        "prompt_tokens_cached",
        "counter",
        "Those of them that were found in the prefix cache.",
        aliases=(_vllm("prompt_tokens_cached_total"),),
    ),
    Family(
        "generation_tokens",
        "counter",
        "Output tokens.",
        aliases=(_vllm("generation_tokens_total"),),
    ),
    Family(
        "prefix_cache_queries",
        "counter",
        "Prompt tokens that were looked up in the prefix cache.",
        aliases=(_vllm("prefix_cache_queries_total"),),
    ),
    Family(
        "prefix_cache_hits",
        "counter",
        "Prompt tokens that were found in the prefix cache.",
        aliases=(_vllm("prefix_cache_hits_total"),),
    ),
    Family(
        "num_preemptions",
        "counter",
        "Preemptions: a request lost its KV blocks and is computed again.",
        aliases=(_vllm("num_preemptions_total"),),
    ),
    Family(
        "request_success",
        "counter",
        "Requests that ended, by reason: stop, length, abort (cancelled) or error.",
        ("finished_reason",),
        _each(FINISHED_REASONS),
        aliases=(_vllm("request_success_total"),),
    ),
    Family(
        "request_errors",
        "counter",
        "Accepted requests that failed, by kind of error.",
        ("error_kind",),
        _each(ERROR_KINDS),
    ),
    Family(
        "requests_refused",
        "counter",
        "Requests that were not accepted, by kind of error and by who refused them: the engine, or "
        "a front in Triton before it.",
        ("error_kind", "by"),
        tuple((kind, by) for by in (ENGINE, FRONT) for kind in ERROR_KINDS),
    ),
    Family(
        "queue_refusals",
        "counter",
        "Requests that were not accepted because the queue was full, by the limiting setting.",
        ("limit",),
        _each(QUEUE_LIMITS),
    ),
    Family(
        "queue_timeouts",
        "counter",
        "Accepted requests that were queued for longer than `queue_timeout_s` allows.",
    ),
    Family(
        "deadline_misses",
        "counter",
        "Requests whose `deadline_ms` passed: before their first step, or later.",
        ("state",),
        _each(DEADLINE_STATES),
    ),
    Family(
        "spec_decode_num_drafts",
        "counter",
        "Verifications of drafts: sequences with drafts, summed over the steps.",
        aliases=(_vllm("spec_decode_num_drafts_total"),),
    ),
    Family(
        "spec_decode_num_draft_tokens",
        "counter",
        "Draft tokens verified.",
        aliases=(_vllm("spec_decode_num_draft_tokens_total"),),
    ),
    Family(
        "spec_decode_num_accepted_tokens",
        "counter",
        "Draft tokens accepted.",
        aliases=(_vllm("spec_decode_num_accepted_tokens_total"),),
    ),
    Family(
        "spec_decode_num_draft_tokens_from_outputs",
        "counter",
        "Draft tokens verified that are from the outputs of earlier requests.",
    ),
    Family(
        "spec_decode_num_accepted_tokens_from_outputs",
        "counter",
        "Draft tokens accepted that are from the outputs of earlier requests.",
    ),
    Family(
        "spec_decode_num_accepted_tokens_per_pos",
        "counter",
        "Draft tokens accepted, by their position among the drafts of a step.",
        ("position",),
        _each(map(str, range(MAX_DRAFTS))),
        aliases=(_vllm("spec_decode_num_accepted_tokens_per_pos_total"),),
    ),
    Family(
        "time_to_first_token_seconds",
        "histogram",
        "Time from a request's arrival to its first output token.",
        bounds=_FIRST_TOKEN_S,
        aliases=(_vllm("time_to_first_token_seconds"),),
    ),
    Family(
        "inter_token_latency_seconds",
        "histogram",
        "Time between two steps that gave a sequence tokens: one token each, or with accepted "
        "drafts several.",
        bounds=_TOKEN_S,
        aliases=(_vllm("inter_token_latency_seconds"), _vllm("time_per_output_token_seconds")),
    ),
    Family(
        "request_time_per_output_token_seconds",
        "histogram",
        "Mean time per output token after the first, of each request that succeeded.",
        bounds=_TOKEN_S,
        aliases=(_vllm("request_time_per_output_token_seconds"),),
    ),
    Family(
        "e2e_request_latency_seconds",
        "histogram",
        "Time from arrival to the last token, of each request that succeeded.",
        bounds=_REQUEST_S,
        aliases=(_vllm("e2e_request_latency_seconds"),),
    ),
    Family(
        "request_queue_time_seconds",
        "histogram",
        "Time from arrival to the first step, of each request that succeeded.",
        bounds=_REQUEST_S,
        aliases=(_vllm("request_queue_time_seconds"),),
    ),
    Family(
        "request_inference_time_seconds",
        "histogram",
        "Time from the first step to the last token, of each request that succeeded.",
        bounds=_REQUEST_S,
        aliases=(_vllm("request_inference_time_seconds"),),
    ),
    Family(
        "request_prefill_time_seconds",
        "histogram",
        "Time from the first step to the first token, of each request that succeeded.",
        bounds=_REQUEST_S,
        aliases=(_vllm("request_prefill_time_seconds"),),
    ),
    Family(
        "request_decode_time_seconds",
        "histogram",
        "Time from the first to the last token, of each request that succeeded.",
        bounds=_REQUEST_S,
        aliases=(_vllm("request_decode_time_seconds"),),
    ),
    Family(
        "request_prompt_tokens",
        "histogram",
        "Prompt tokens of each request that succeeded.",
        bounds=_NUM_TOKENS,
        aliases=(
            _vllm("request_prompt_tokens"),
            Alias(
                "trtllm",
                "nv_llm_input_token_len",
                (("response_metric_type", "total_input_tokens"),),
            ),
        ),
    ),
    Family(
        "request_generation_tokens",
        "histogram",
        "Output tokens of each request that succeeded.",
        bounds=_NUM_TOKENS,
        aliases=(
            _vllm("request_generation_tokens"),
            _vllm("request_max_num_generation_tokens"),
            Alias(
                "trtllm",
                "nv_llm_output_token_len",
                (("response_metric_type", "total_output_tokens"),),
            ),
        ),
    ),
    Family(
        "iteration_tokens_total",
        "histogram",
        "Tokens computed in a step.",
        bounds=_STEP_TOKENS,
        aliases=(_vllm("iteration_tokens_total"),),
    ),
    Family(
        "step_seconds",
        "histogram",
        "Time of a step: of decodes alone, or with a prompt or a part of one.",
        ("phase",),
        _each(PHASES),
        bounds=_STEP_S,
    ),
)
"""All of them, in the order in which snapshots hold their values."""

BY_STEM = {family.stem: family for family in FAMILIES}


def parse_compat(text: str, where: str) -> frozenset[str]:
    """The flavours of a list such as `vllm,trtllm`; none of an empty one.

    Raises:
        ConfigError: an item is not one of FLAVOURS; names `where`.
    """
    items = [item.strip() for item in text.split(",") if item.strip()]
    for item in items:
        if item not in FLAVOURS:
            raise ConfigError(
                f"{where}: has {item!r}; allowed: {', '.join(FLAVOURS)}, separated by commas"
                f"{did_you_mean(item, FLAVOURS)}"
            )
    return frozenset(items)


def published(flavours: Iterable[str] = ()) -> list[str]:
    """Names of all series that are published, and of those flavours' aliases."""
    wanted = set(flavours)
    names: dict[str, None] = {}
    for family in FAMILIES:
        own = [family.name, *(one.name for one in family.aliases if one.flavour in wanted)]
        suffixes = ("_bucket", "_sum", "_count") if family.kind == "histogram" else ("",)
        names |= dict.fromkeys(name + suffix for name in own for suffix in suffixes)
    return list(names)
