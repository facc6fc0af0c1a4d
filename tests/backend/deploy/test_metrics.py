"""The metrics endpoint of the engines."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from inflight.deploy.metrics import MetricsServer, render
from inflight.engine.metrics.families import FLAVOURS, published
from inflight.engine.metrics.snapshot import Published, Sample
from inflight.ipc.metrics.source import ModelMetrics
from metric_snapshots import empty, observed, with_values


def labels(model):
    return {"model_name": "small", "engine": "0", "model": model, "version": "1"}


@pytest.mark.parametrize("flavours", [(), ("vllm",), FLAVOURS])
def test_all_names_are_rendered_each_family_once(flavours):
    models = [ModelMetrics(labels(model), empty()) for model in ("a", "b")]
    text = render(models, frozenset(flavours)).decode()
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    samples = [sample for family in families for sample in family.samples]
    assert {sample.name for sample in samples} == set(published(flavours))
    keys = [(one.name, tuple(sorted(one.labels.items()))) for one in samples]
    assert len(set(keys)) == len(keys)
    assert {sample.labels["model"] for sample in samples} == {"a", "b"}


def test_values_and_types_are_rendered():
    metrics = with_values(empty(), generation_tokens=12)
    metrics = observed(metrics, "time_to_first_token_seconds", [0.03, 0.5])
    text = render([ModelMetrics(labels("llm"), metrics)], frozenset({"vllm"})).decode()
    samples = {
        (sample.name, sample.labels.get("le")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    for prefix in ("inflight_", "vllm:"):
        assert samples[f"{prefix}generation_tokens_total", None] == 12
        assert samples[f"{prefix}time_to_first_token_seconds_bucket", "0.04"] == 1
        assert samples[f"{prefix}time_to_first_token_seconds_count", None] == 2
    assert "# TYPE inflight_time_to_first_token_seconds histogram" in text
    assert "# TYPE inflight_generation_tokens_total counter" in text


def test_the_server_answers_only_its_path():
    server = MetricsServer(("127.0.0.1", 0), lambda: b"up 1\n")
    base = f"http://127.0.0.1:{server.address[1]}"
    try:
        with urllib.request.urlopen(f"{base}/metrics", timeout=60) as response:
            assert response.read() == b"up 1\n"
            assert response.headers["Content-Type"].startswith("text/plain")
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{base}/", timeout=60)
        # A client that never finishes its request does not block others.
        with socket.create_connection(server.address) as idle:
            idle.sendall(b"GET /met")
            with urllib.request.urlopen(f"{base}/metrics", timeout=60) as response:
                assert response.status == 200
    finally:
        server.close()
    with pytest.raises(OSError):
        urllib.request.urlopen(f"{base}/metrics", timeout=60)


def test_further_families_are_rendered_beside_the_models():
    further = [Published("inflight_x_total", "counter", "Xs.", [Sample("", {"of": "a"}, 3.0)])]
    models = [ModelMetrics(labels("llm"), empty())]
    text = render(models, further=further).decode()
    assert '# TYPE inflight_x_total counter\ninflight_x_total{of="a"} 3.0' in text
    assert "inflight_generation_tokens_total{" in text
