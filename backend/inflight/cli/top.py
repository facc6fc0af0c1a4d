"""`inflight top`: what a running server does, from its metrics endpoint."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import math
import sys
import time
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from inflight.core.model_version import SEPARATOR
from inflight.engine.metrics.families import LABELS, PREFIX
from inflight.errors import EngineError

TIMEOUT_S = 5.0
MAX_BYTES = 16 << 20
_HISTOGRAM_SUFFIXES = ("_bucket", "_sum", "_count")

Series = dict[tuple[str, tuple[str, ...]], float]
"""Values by name and the values of a family's own labels; names without prefix."""
Version = tuple[str, str]
"""A model and its version."""


@dataclass(frozen=True, slots=True)
class Scrape:
    """The metrics of all models at one time.

    Attributes:
        time: in seconds, monotonic.
        models: by Triton's name and version of the model.
        names: the checkpoints' names.
    """

    time: float
    models: dict[Version, Series]
    names: dict[Version, str]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What a model did between two scrapes; None where it did nothing of the kind.

    Attributes:
        model, checkpoint: Triton's name, with @VERSION if there are several, and the name of what
            it serves.
        running, waiting, suspended: requests by state, at the end.
        kv_use: fraction of the KV blocks in use, at the end.
        requests_per_s, errors_per_s: requests that succeeded, and that failed or were refused.
        prompt_tokens_per_s, output_tokens_per_s: rates.
        prefix_hit_rate: fraction of the prompt tokens that came from the prefix cache.
        draft_acceptance: fraction of the draft tokens that were accepted.
        ttft_p50_s, ttft_p95_s: time to first token.
        itl_p50_s, itl_p95_s: inter-token latency.
    """

    model: str
    checkpoint: str
    running: int
    waiting: int
    suspended: int
    kv_use: float
    requests_per_s: float
    errors_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    prefix_hit_rate: float | None
    draft_acceptance: float | None
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    itl_p50_s: float | None
    itl_p95_s: float | None


def run(
    url: str, *, interval_s: float, once: bool, as_json: bool, console: Console | None = None
) -> int:
    """Show a table until Ctrl-C, or once; as JSON for programs.

    Raises:
        EngineError: the endpoint does not answer with metrics of this product.
    """
    console = console or Console()
    with contextlib.suppress(KeyboardInterrupt):
        if once or as_json or not console.is_terminal:
            _print(url, interval_s, once, as_json, console)
        else:
            _watch(url, interval_s, console)
    return 0


def scrape(url: str, clock: Callable[[], float] = time.monotonic) -> Scrape:
    """Read the metrics endpoint.

    Raises:
        EngineError: it does not answer with metrics of this product.
    """
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            text = response.read(MAX_BYTES).decode()
        found = parse(text, clock())
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise EngineError(
            f"{url} shows no metrics ({reason}); start a server with `inflight serve`, or set --url"
        ) from None
    if not found.models:
        raise EngineError(f"{url} shows no model of inflight: wait until its engine is loaded")
    return found


def parse(text: str, now: float) -> Scrape:
    """Read Prometheus's text format; whatever is not of this product is skipped.

    Raises:
        ValueError: it is another format.
    """
    models: defaultdict[Version, Series] = defaultdict(dict)
    names: dict[Version, str] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample_name(sample.name)
            if not name.startswith(PREFIX) or "model" not in sample.labels:
                continue
            model = sample.labels["model"], sample.labels.get("version", "")
            names[model] = sample.labels.get("model_name", "")
            # By the labels' names: their order is not significant.
            own = sorted(pair for pair in sample.labels.items() if pair[0] not in LABELS)
            values = tuple(value for _, value in own)
            models[model][name.removeprefix(PREFIX), values] = sample.value
    return Scrape(now, dict(models), names)


def sample_name(name: str) -> str:
    """A sample's name as published: the parser appends _total to all counters, and on Triton's port
    the series of histograms are counters."""
    stem = name.removesuffix("_total")
    return stem if stem.endswith(_HISTOGRAM_SUFFIXES) else name


def num_in_flight(found: Scrape) -> int:
    """Requests of all models that run, wait or are suspended."""
    names = [(f"num_requests_{state}", ()) for state in ("running", "waiting", "suspended")]
    return int(sum(series.get(name, 0.0) for series in found.models.values() for name in names))


def rows(before: Scrape, now: Scrape) -> list[Row]:
    """What each model did between two scrapes."""
    seconds = max(now.time - before.time, 1e-9)
    num_versions = Counter(model for model, _ in now.models)
    found = []
    for key, series in sorted(now.models.items()):
        model, version = key
        name = f"{model}{SEPARATOR}{version}" if num_versions[model] > 1 else model
        change = _Change(before.models.get(key, {}), series)
        found.append(_row(name, now.names[key], change, seconds))
    return found


def quantile(buckets: list[tuple[float, float]], share: float) -> float | None:
    """A quantile of a histogram, linear within buckets, as Prometheus computes it.

    Args:
        buckets: (inclusive upper bound, cumulative count), ascending; the last bound is infinite.
        share: from 0 to 1.

    Returns:
        None if there are no observations; for those beyond the last bound, that bound.
    """
    total = buckets[-1][1] if buckets else 0.0
    if total <= 0:
        return None
    rank = share * total
    low, below = 0.0, 0.0
    for bound, count in buckets:
        if count >= rank and count > below:
            return (
                low if bound == math.inf else low + (bound - low) * (rank - below) / (count - below)
            )
        low, below = bound, max(below, count)
    return low


class _Change:
    """The series of a model, and by how much they have grown."""

    def __init__(self, before: Series, now: Series) -> None:
        self._before = before
        self._now = now

    def gauge(self, name: str) -> float:
        return self._now.get((name, ()), 0.0)

    def counter(self, name: str, *skipped: str) -> float:
        """The growth of all series of a counter, but of those with a skipped label value."""
        return sum(
            self._growth(key)
            for key in self._now
            if key[0] == name and not set(key[1]) & set(skipped)
        )

    def quantiles(self, name: str) -> tuple[float | None, float | None]:
        """p50 and p95 of what a histogram has observed."""
        buckets = sorted(
            (float(values[-1].replace("+Inf", "inf")), self._growth((key, values)))
            for key, values in self._now
            if key == f"{name}_bucket"
        )
        # Series are read one by one while they grow, so a wider bucket may lag behind.
        counts = itertools.accumulate((count for _, count in buckets), max)
        grown = [(bound, count) for (bound, _), count in zip(buckets, counts, strict=True)]
        return quantile(grown, 0.5), quantile(grown, 0.95)

    def ratio(self, part: str, whole: str) -> float | None:
        total = self.counter(whole)
        return self.counter(part) / total if total else None

    def _growth(self, key: tuple[str, tuple[str, ...]]) -> float:
        grown = self._now[key] - self._before.get(key, 0.0)
        return grown if grown >= 0 else self._now[key]  # the server has been restarted


def _row(model: str, checkpoint: str, change: _Change, seconds: float) -> Row:
    ttft_p50_s, ttft_p95_s = change.quantiles("time_to_first_token_seconds")
    itl_p50_s, itl_p95_s = change.quantiles("inter_token_latency_seconds")
    errors = change.counter("request_errors_total") + change.counter("requests_refused_total")
    return Row(
        model=model,
        checkpoint=checkpoint,
        running=int(change.gauge("num_requests_running")),
        waiting=int(change.gauge("num_requests_waiting")),
        suspended=int(change.gauge("num_requests_suspended")),
        kv_use=change.gauge("kv_cache_usage_perc"),
        requests_per_s=change.counter("request_success_total", "abort", "error") / seconds,
        errors_per_s=errors / seconds,
        prompt_tokens_per_s=change.counter("prompt_tokens_total") / seconds,
        output_tokens_per_s=change.counter("generation_tokens_total") / seconds,
        prefix_hit_rate=change.ratio("prefix_cache_hits_total", "prefix_cache_queries_total"),
        draft_acceptance=change.ratio(
            "spec_decode_num_accepted_tokens_total", "spec_decode_num_draft_tokens_total"
        ),
        ttft_p50_s=ttft_p50_s,
        ttft_p95_s=ttft_p95_s,
        itl_p50_s=itl_p50_s,
        itl_p95_s=itl_p95_s,
    )


def _print(url: str, interval_s: float, once: bool, as_json: bool, console: Console) -> None:
    """Write one reading after the other, or only one."""
    before = scrape(url)
    while True:
        time.sleep(interval_s)
        now = scrape(url)
        found = rows(before, now)
        if as_json:
            sys.stdout.write(msgspec.json.encode({"models": found}).decode() + "\n")
            sys.stdout.flush()
        else:
            console.print(_table(found))
        if once:
            return
        before = now


def _watch(url: str, interval_s: float, console: Console) -> None:
    """Show the latest reading on the whole screen."""
    before = scrape(url)
    with Live(Text(url), console=console, auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(interval_s)
            before, shown = _next(url, before)
            live.update(shown, refresh=True)


def _next(url: str, before: Scrape) -> tuple[Scrape, RenderableType]:
    """The next scrape and its table; without an answer, the same one and the reason."""
    try:
        now = scrape(url)
    except EngineError as error:
        return before, Text(str(error))  # not markup, whatever it looks like
    return now, Group(Text(url), _table(rows(before, now)))


def _table(found: list[Row]) -> Table:
    """One column per model."""
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for row in found:
        table.add_column(Text(f"{row.model}\n{row.checkpoint}"), justify="right")
    for label, cell in _LINES:
        table.add_row(label, *(cell(row) for row in found))
    return table


def _number(value: float) -> str:
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _times(*values: float | None) -> str:
    return " / ".join("-" if one is None else f"{one * 1e3:,.1f} ms" for one in values)


_LINES: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("running", lambda row: str(row.running)),
    ("waiting", lambda row: str(row.waiting)),
    ("suspended", lambda row: str(row.suspended)),
    ("KV blocks in use", lambda row: _percent(row.kv_use)),
    ("prefix cache hits", lambda row: _percent(row.prefix_hit_rate)),
    ("drafts accepted", lambda row: _percent(row.draft_acceptance)),
    ("requests/s", lambda row: _number(row.requests_per_s)),
    ("errors/s", lambda row: _number(row.errors_per_s)),
    ("prompt tokens/s", lambda row: _number(row.prompt_tokens_per_s)),
    ("output tokens/s", lambda row: _number(row.output_tokens_per_s)),
    ("first token p50 / p95", lambda row: _times(row.ttft_p50_s, row.ttft_p95_s)),
    ("inter-token p50 / p95", lambda row: _times(row.itl_p50_s, row.itl_p95_s)),
)
