"""Metrics by tenant, in Prometheus's text format."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, generate_latest

# Further tenants are one series together: a series costs memory here and in Prometheus.
MAX_TENANTS = 1000
OTHERS = "_others"


class TenantMetrics:
    """Counts since the accountant's start."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._tenants: set[str] = set()
        self._requests = self._counter("requests", "Inference requests that were admitted.")
        self._refused = self._counter("refused", "Requests refused by a limit.", "limit")
        self._prompt = self._counter("prompt_tokens", "Prompt tokens, cached ones included.")
        self._generation = self._counter("generation_tokens", "Tokens of outputs that have ended.")

    def admitted(self, tenant: str) -> None:
        self._requests.labels(self._label(tenant)).inc()

    def refused(self, tenant: str, limit: str) -> None:
        self._refused.labels(self._label(tenant), limit).inc()

    def used(self, tenant: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        label = self._label(tenant)
        self._prompt.labels(label).inc(num_prompt_tokens)
        self._generation.labels(label).inc(num_output_tokens)

    def text(self) -> str:
        return generate_latest(self._registry).decode()

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        counter = Counter(
            f"inflight_tenant_{name}", meaning, ("tenant", *labels), registry=self._registry
        )
        return counter

    def _label(self, tenant: str) -> str:
        if tenant in self._tenants:
            return tenant
        if len(self._tenants) >= MAX_TENANTS:
            return OTHERS
        self._tenants.add(tenant)
        return tenant
