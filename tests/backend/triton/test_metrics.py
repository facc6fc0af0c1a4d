"""What a front publishes on Triton's metrics port."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

import triton_python_backend_utils as pb_utils
from inflight.engine.metrics.families import COMPAT_VARIABLE, FAMILIES, published
from inflight.engine.metrics.snapshot import Metrics
from inflight.errors import ConfigError, EngineError
from inflight.ipc.owner import Owner
from inflight.triton import metrics as triton_metrics
from inflight.triton.metrics import MetricsPublisher
from metric_snapshots import empty, observed, with_values

OWN = {"model_name": "small", "engine": "0", "model": "llm", "version": "3"}


class Client:
    """An attached engine."""

    welcome = SimpleNamespace(model_name="small")

    def __init__(self, metrics: Metrics | None = None) -> None:
        self.now = metrics
        self.num_asked = 0
        self.refusals: dict[str, int] = {}

    def metrics(self) -> Metrics:
        self.num_asked += 1
        if self.now is None:
            raise EngineError("the engine has exited")
        return self.now

    def refused(self, counts: dict[str, int]) -> None:
        self.refusals |= counts


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(triton_metrics, "INTERVAL_S", 0.005)
    for name in ("registry", "kinds"):
        monkeypatch.setattr(pb_utils.MetricFamily, name, {})
    folder = tmp_path / "llm"
    (folder / "3").mkdir(parents=True)
    (folder / "3" / "engine.json").write_text("{}")
    return folder


def publisher(model, client, **parameters):
    return MetricsPublisher(model, Owner(1, is_supervisor=False), lambda: client, parameters)


def value(name, **labels):
    key = name, tuple(sorted((OWN | labels).items()))
    return pb_utils.MetricFamily.registry.get(key)


def wait_for(is_so):
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def cycles(client, count=2):
    """Wait for so many publications that began from now on."""
    before = client.num_asked
    wait_for(lambda: client.num_asked > before + count)


def later():
    metrics = with_values(empty(), generation_tokens=7, num_requests_running=2)
    return observed(metrics, "time_to_first_token_seconds", [0.03, 0.3, 0.3])


def test_values_follow_the_engine(model):
    client = Client(empty())
    front = publisher(model, client)
    wait_for(lambda: value("inflight_generation_tokens_total") == 0)
    client.now = later()
    cycles(client)
    assert value("inflight_generation_tokens_total") == 7
    assert value("inflight_num_requests_running") == 2
    stem = "inflight_time_to_first_token_seconds"
    assert value(f"{stem}_bucket", le="0.02") == 0
    assert value(f"{stem}_bucket", le="0.04") == 1
    assert value(f"{stem}_bucket", le="+Inf") == 3
    assert value(f"{stem}_count") == 3
    assert value(f"{stem}_sum") == pytest.approx(0.63)
    client.now = with_values(later(), num_requests_running=1)
    cycles(client)
    assert value("inflight_num_requests_running") == 1
    front.close()
    assert {name for name, _ in pb_utils.MetricFamily.registry} == set(published())


def test_what_has_not_changed_is_not_sent(model):
    client = Client(later())
    front = publisher(model, client)
    cycles(client)
    calls = pb_utils.MetricFamily.calls
    cycles(client, 5)
    assert pb_utils.MetricFamily.calls == calls
    front.close()


def test_counters_stay_monotonic_over_an_engine_restart(model):
    client = Client(later())
    front = publisher(model, client)
    cycles(client)
    before = dict(pb_utils.MetricFamily.registry)
    client.now = None
    cycles(client)
    assert value("inflight_engine_up") == 0
    assert value("inflight_num_requests_running") == 0
    client.now = with_values(empty(engine=2), generation_tokens=5, engine_up=1)
    cycles(client)
    front.close()
    assert value("inflight_generation_tokens_total") == 12
    assert value("inflight_engine_restarts_total") == 1
    assert value("inflight_engine_up") == 1
    gauges = {family.name for family in FAMILIES if family.kind == "gauge"}
    for key, number in pb_utils.MetricFamily.registry.items():
        if key[0] not in gauges:
            assert number >= before[key]


def test_only_one_front_publishes_and_another_one_takes_over(model):
    first, second = Client(later()), Client(later())
    publishing = publisher(model, first)
    cycles(first)
    waiting = publisher(model, second)
    time.sleep(0.05)
    assert second.num_asked == 0
    publishing.close()
    second.now = with_values(later(), generation_tokens=9)
    cycles(second)
    waiting.close()
    # The registry still has the first one's series, as after its death: their values continue.
    assert value("inflight_generation_tokens_total") == 9


def test_refusals_of_every_front_are_told_to_the_engine(model):
    first, second = Client(later()), Client(later())
    fronts = [publisher(model, client) for client in (first, second)]
    for _ in range(2):
        fronts[1].refused("invalid")
    fronts[1].refused("capacity")
    wait_for(lambda: second.refusals)
    for front in fronts:
        front.close()
    assert second.refusals == {"invalid": 2, "capacity": 1}
    assert first.refusals == {}


@pytest.mark.parametrize("by_environment", [False, True])
def test_aliases_are_published_on_request(model, monkeypatch, by_environment):
    client = Client(with_values(later(), kv_cache_max_blocks=64, kv_cache_block_size=16))
    if by_environment:
        monkeypatch.setenv(COMPAT_VARIABLE, "vllm, trtllm")
        front = publisher(model, client)
    else:
        front = publisher(model, client, metrics_compat="vllm,trtllm")
    cycles(client)
    front.close()
    found = {name for name, _ in pb_utils.MetricFamily.registry}
    assert found == set(published(["vllm", "trtllm"]))
    assert value("vllm:generation_tokens_total") == 7
    assert value("vllm:cache_config_info", block_size="16", num_gpu_blocks="64") == 1
    labels = {"model": "llm", "version": "3", "kv_cache_block_type": "max"}
    key = "nv_trt_llm_kv_cache_block_metrics", tuple(sorted(labels.items()))
    assert pb_utils.MetricFamily.registry[key] == 64


def test_an_unknown_flavour_is_refused(model):
    with pytest.raises(ConfigError, match="metrics_compat: has 'vlm'; allowed: vllm, trtllm"):
        publisher(model, Client(), metrics_compat="vlm")


def test_a_triton_without_metrics_serves_on(model, monkeypatch, caplog):
    def unsupported(*args, **kwargs):
        raise pb_utils.TritonModelException("metrics are not supported")

    monkeypatch.setattr(pb_utils, "MetricFamily", unsupported)
    front = publisher(model, Client(later()))
    wait_for(lambda: "no metrics are published" in caplog.text)
    front.refused("invalid")
    front.close()
