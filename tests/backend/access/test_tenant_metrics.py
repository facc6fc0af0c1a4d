"""Metrics by tenant."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from inflight.access import tenant_metrics
from inflight.access.tenant_metrics import OTHERS, TenantMetrics


def samples(metrics: TenantMetrics) -> dict[tuple[str, str], float]:
    return {
        (sample.name, sample.labels["tenant"]): sample.value
        for family in text_string_to_metric_families(metrics.text())
        for sample in family.samples
        if sample.name.endswith("_total")
    }


def test_counts_are_by_tenant() -> None:
    metrics = TenantMetrics()
    metrics.admitted("a")
    metrics.used("a", 10, 3)
    metrics.used("a", 5, 1)
    metrics.refused("b", "requests_per_minute")
    assert samples(metrics) == {
        ("inflight_tenant_requests_total", "a"): 1,
        ("inflight_tenant_prompt_tokens_total", "a"): 15,
        ("inflight_tenant_generation_tokens_total", "a"): 4,
        ("inflight_tenant_refused_total", "b"): 1,
    }


def test_the_number_of_series_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_metrics, "MAX_TENANTS", 3)
    metrics = TenantMetrics()
    for _ in range(2):
        for number in range(10):
            metrics.admitted(str(number))
    found = samples(metrics)
    assert len(found) == 4
    assert found["inflight_tenant_requests_total", "0"] == 2
    assert found["inflight_tenant_requests_total", OTHERS] == 14
