"""`inflight top`, from the text of a metrics endpoint to its rows."""

from __future__ import annotations

import io
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from inflight.cli import top
from inflight.deploy.metrics import MetricsServer, render
from inflight.engine.metrics.families import BY_STEM
from inflight.engine.metrics.snapshot import Metrics
from inflight.errors import EngineError
from inflight.ipc.metrics.source import ModelMetrics
from metric_snapshots import empty, observed, with_values

LABELS = {"model_name": "small", "engine": "0", "model": "llm", "version": "1"}


def shown(metrics: Metrics) -> str:
    return render([ModelMetrics(LABELS, metrics)]).decode()


def as_triton_shows_it(text: str) -> str:
    """There, each series of a histogram is a family of counters."""
    lines = []
    for line in text.splitlines():
        if line.startswith("# TYPE ") and line.endswith(" histogram"):
            name = line.split()[2]
            lines += [f"# TYPE {name}{suffix} counter" for suffix in ("_bucket", "_sum", "_count")]
        elif not line.startswith("#") or "counter" in line or "gauge" in line:
            lines.append(line)
    return "\n".join(lines) + "\n"


def later() -> Metrics:
    metrics = with_values(
        empty(),
        num_requests_running=3,
        num_requests_waiting=2,
        kv_cache_usage_perc=0.25,
        prompt_tokens=500,
        generation_tokens=100,
        prefix_cache_queries=500,
        prefix_cache_hits=125,
        request_success={"stop": 4, "abort": 7},
        request_errors={"engine": 2},
    )
    metrics = observed(metrics, "time_to_first_token_seconds", [0.03] * 10)
    return observed(metrics, "inter_token_latency_seconds", [0.006] * 95 + [0.2] * 5)


@pytest.mark.parametrize("as_shown", [str, as_triton_shows_it])
def test_rows_show_the_growth_between_two_scrapes(as_shown):
    before = top.parse(as_shown(shown(empty())), 10.0)
    (row,) = top.rows(before, top.parse(as_shown(shown(later())), 12.0))
    assert (row.model, row.checkpoint) == ("llm", "small")
    assert (row.running, row.waiting, row.kv_use) == (3, 2, 0.25)
    assert (row.prompt_tokens_per_s, row.output_tokens_per_s) == (250, 50)
    assert (row.requests_per_s, row.errors_per_s) == (2, 1)
    assert row.prefix_hit_rate == 0.25
    assert row.draft_acceptance is None
    assert 0.02 < row.ttft_p50_s <= 0.04
    assert 0.005 < row.itl_p50_s <= 0.0075
    assert row.itl_p95_s == pytest.approx(0.0075)


def test_versions_of_a_model_have_rows_of_their_own():
    versions = [
        ModelMetrics({**LABELS, "version": str(version)}, with_values(empty(), **values))
        for version, values in (
            (1, {"num_requests_running": 3}),
            (2, {"num_requests_running": 5}),
        )
    ]
    before, now = (top.parse(render(found).decode(), 0.0) for found in (versions[:1], versions))
    assert [(row.model, row.running) for row in top.rows(before, now)] == [
        ("llm@1", 3),
        ("llm@2", 5),
    ]


def test_a_restarted_server_counts_from_zero():
    before = top.parse(shown(with_values(empty(), generation_tokens=1000)), 0.0)
    (row,) = top.rows(before, top.parse(shown(later()), 1.0))
    assert row.output_tokens_per_s == 100


@given(st.lists(st.floats(0, 3000), min_size=1, max_size=50), st.floats(0.01, 1))
def test_a_quantile_lies_in_the_bucket_of_the_value(values, share):
    bounds = (*BY_STEM["time_to_first_token_seconds"].bounds, math.inf)
    buckets = [(bound, float(sum(one <= bound for one in values))) for bound in bounds]
    exact = sorted(values)[max(0, math.ceil(share * len(values) - 1e-9) - 1)]
    found = top.quantile(buckets, share)
    index = next(index for index, bound in enumerate(bounds) if exact <= bound)
    low = bounds[index - 1] if index else 0.0
    high = bounds[-2] if index == len(bounds) - 1 else bounds[index]
    assert low - 1e-9 <= found <= high + 1e-9


def test_no_observations_have_no_quantile():
    assert top.quantile([(0.1, 0.0), (math.inf, 0.0)], 0.5) is None
    assert top.quantile([], 0.5) is None


def test_once_as_json_prints_one_object(capsys):
    texts = [shown(empty()).encode(), shown(later()).encode()]
    server = MetricsServer(("127.0.0.1", 0), lambda: texts.pop(0))
    try:
        url = f"http://127.0.0.1:{server.address[1]}/metrics"
        assert top.run(url, interval_s=0.01, once=True, as_json=True) == 0
    finally:
        server.close()
    (model,) = json.loads(capsys.readouterr().out)["models"]
    assert model["model"] == "llm"
    assert model["running"] == 3
    assert model["output_tokens_per_s"] > 0
    assert model["draft_acceptance"] is None


def test_once_prints_a_table():
    texts = [shown(empty()).encode(), shown(later()).encode()]
    server = MetricsServer(("127.0.0.1", 0), lambda: texts.pop(0))
    console = Console(file=io.StringIO(), width=60)
    try:
        url = f"http://127.0.0.1:{server.address[1]}/metrics"
        top.run(url, interval_s=0.01, once=True, as_json=False, console=console)
    finally:
        server.close()
    text = console.file.getvalue()
    assert "running" in text
    assert "25.0%" in text


def test_an_endpoint_that_does_not_answer_is_an_error():
    with pytest.raises(EngineError, match=r"http://127.0.0.1:1/metrics shows no metrics \(.*refu"):
        top.scrape("http://127.0.0.1:1/metrics")


def test_the_screen_keeps_its_last_reading_and_shows_why_there_is_no_other():
    before = top.parse(shown(later()), 0.0)
    after, text = top._next("http://127.0.0.1:1/metrics", before)
    assert after is before
    console = Console(file=io.StringIO(), width=200)
    console.print(text)
    assert "shows no metrics ([Errno 111]" in console.file.getvalue()


def test_an_endpoint_without_our_models_is_an_error():
    server = MetricsServer(("127.0.0.1", 0), lambda: b"nv_cpu_utilization 0.5\n")
    try:
        with pytest.raises(EngineError, match="shows no model of inflight"):
            top.scrape(f"http://127.0.0.1:{server.address[1]}/metrics")
    finally:
        server.close()
