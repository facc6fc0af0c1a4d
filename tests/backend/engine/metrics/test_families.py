"""The table of metrics."""

from __future__ import annotations

import itertools
import re

import pytest

from inflight.engine.metrics.families import (
    BY_STEM,
    FAMILIES,
    FLAVOURS,
    LABELS,
    parse_compat,
    published,
)
from inflight.errors import ConfigError

# vLLM's bounds; ours may add finer ones before the first.
# fmt: off
VLLM_BOUNDS = {
    "time_to_first_token_seconds": (
        0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
        20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
    ),
    "inter_token_latency_seconds": (
        0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
        20.0, 40.0, 80.0,
    ),
    "e2e_request_latency_seconds": (
        0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
        240.0, 480.0, 960.0, 1920.0, 7680.0,
    ),
    "iteration_tokens_total": (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
}
# fmt: on


def test_names_are_valid_and_each_is_used_once():
    names = published(FLAVOURS)
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"[a-z_:]+[a-z0-9_:]*", name) for name in names)
    assert len(BY_STEM) == len(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.stem)
def test_a_family_is_well_formed(family):
    assert family.meaning.endswith(".")
    assert not set(family.labels) & {*LABELS, "le"}
    assert len(set(family.values)) == len(family.values)
    assert all(len(values) == len(family.labels) for values in family.values)
    assert bool(family.bounds) == (family.kind == "histogram")
    assert all(low < high for low, high in itertools.pairwise(family.bounds))


@pytest.mark.parametrize("alias", ["vllm"])
def test_an_alias_of_vllm_differs_by_its_prefix_alone(alias):
    renamed = {"time_per_output_token_seconds", "request_max_num_generation_tokens"}
    for family in FAMILIES:
        for one in family.aliases:
            if one.flavour == alias and one.name.removeprefix("vllm:") not in renamed:
                assert one.name == family.name.replace("inflight_", "vllm:")


@pytest.mark.parametrize("stem", VLLM_BOUNDS)
def test_buckets_include_those_of_vllm(stem):
    assert set(VLLM_BOUNDS[stem]) <= set(BY_STEM[stem].bounds)


def test_flavours_are_parsed():
    assert parse_compat("", "x") == frozenset()
    assert parse_compat(" vllm,trtllm ", "x") == {"vllm", "trtllm"}
    with pytest.raises(ConfigError, match=r"x: has 'vllms'; allowed: vllm, trtllm, .*mean 'vllm'"):
        parse_compat("vllms", "x")
