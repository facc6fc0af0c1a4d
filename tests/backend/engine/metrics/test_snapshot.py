"""Snapshots: flat arrays, sums over engines, and what is published of them."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.engine.metrics.families import FAMILIES, LABELS, published
from inflight.engine.metrics.snapshot import Metrics, Totals, publish
from metric_snapshots import empty, observed, with_values

OWN = {"model_name": "small", "engine": "0", "model": "llm", "version": "1"}


def values_of(metrics, *flavours):
    return {
        (one.name + suffix, tuple(sorted(labels.items()))): value
        for one in publish(metrics, OWN, frozenset(flavours))
        for suffix, labels, value in one.samples
    }


def test_values_are_found_by_name():
    metrics = with_values(empty(), generation_tokens=3, request_success={"stop": 2, "abort": 1})
    assert metrics.value("generation_tokens") == 3
    assert metrics.value("request_success", "stop") == 2
    assert metrics.value("request_success", "length") == 0
    metrics = observed(metrics, "step_seconds", [0.01, 5.0], "prefill")
    counts, total = metrics.histogram("step_seconds", "prefill")
    assert sum(counts) == 2
    assert total == pytest.approx(5.01)
    assert sum(metrics.histogram("step_seconds", "decode")[0]) == 0


def test_a_snapshot_of_another_table_is_refused():
    encoded = msgspec.msgpack.encode(empty())
    assert msgspec.msgpack.decode(encoded, type=Metrics) == empty()
    other = msgspec.msgpack.encode(
        {"type": "metrics", "engine": 1, "values": [0.0], "counts": [], "sums": []}
    )
    with pytest.raises(msgspec.ValidationError, match="another version"):
        msgspec.msgpack.decode(other, type=Metrics)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.data())
def test_totals_add_up_over_engines(growths, data):
    """Whatever is polled when: each engine's last snapshot counts, once."""
    totals = Totals()
    before = 0.0
    engine, own, expected = 1, 0, 0
    for growth in growths:
        if data.draw(st.booleans()):
            engine, own = engine + 1, 0
        own += growth
        expected += growth
        snapshot = with_values(empty(engine), generation_tokens=own)
        snapshot = observed(snapshot, "request_prompt_tokens", [7.0] * own)
        found = totals.add(snapshot)
        assert found.value("generation_tokens") == expected >= before
        assert sum(found.histogram("request_prompt_tokens")[0]) == expected
        assert found.histogram("request_prompt_tokens")[1] == 7.0 * expected
        before = expected
    assert totals.without_engine().value("generation_tokens") == expected


def test_without_an_engine_its_gauges_are_those_of_an_idle_one():
    totals = Totals()
    assert totals.without_engine() is None
    totals.add(
        with_values(
            empty(),
            engine_up=1,
            num_requests_running=4,
            kv_cache_max_blocks=8,
            kv_cache_blocks={"free": 2, "used": 6},
            prompt_tokens=9,
        )
    )
    found = totals.without_engine()
    assert found.value("engine_up") == found.value("num_requests_running") == 0
    assert found.value("kv_cache_blocks", "free") == 8
    assert found.value("kv_cache_blocks", "used") == 0
    assert found.value("prompt_tokens") == 9


def test_every_name_is_published_once_per_series():
    for flavours in ((), ("vllm",), ("vllm", "trtllm")):
        found = [
            (one.name + sample.suffix, tuple(sorted(sample.labels.items())))
            for one in publish(empty(), OWN, frozenset(flavours))
            for sample in one.samples
        ]
        assert len(found) == len(set(found))
        assert {name for name, _ in found} == set(published(flavours))


@given(st.lists(st.floats(0, 3000), max_size=30))
def test_buckets_are_cumulative_and_end_with_the_count(values):
    shown = observed(empty(), "time_to_first_token_seconds", values)
    name = "inflight_time_to_first_token_seconds"
    (samples,) = (one.samples for one in publish(shown, OWN, frozenset()) if one.name == name)
    buckets = [one for one in samples if one.suffix == "_bucket"]
    assert all(one.value <= other.value for one, other in itertools.pairwise(buckets))
    for one in buckets:
        assert one.value == sum(value <= float(one.labels["le"]) for value in values)
    assert buckets[-1].labels["le"] == "+Inf"
    by_suffix = {one.suffix: one.value for one in samples}
    assert by_suffix["_count"] == len(values)
    assert by_suffix["_sum"] == pytest.approx(sum(values))


def test_labels_are_those_of_each_flavour():
    found = values_of(empty(), "vllm", "trtllm")
    for name, labels in found:
        names = {label for label, _ in labels}
        if name.startswith(("inflight_", "vllm:")):
            assert set(LABELS) <= names
        else:
            assert {"model", "version"} <= names
            assert "model_name" not in names


def test_kinds_agree_with_the_table():
    kinds = {one.name: one.kind for one in publish(empty(), OWN, frozenset())}
    assert kinds == {family.name: family.kind for family in FAMILIES}
