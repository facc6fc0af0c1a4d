"""Survival functions of outputs, from requests that have ended."""

from __future__ import annotations

import numpy as np
import pytest

from inflight.core.request import PriorityClass
from inflight.scheduling.output_lengths import CERTAIN, MAX_KEYS, MIN_SAMPLES, OutputLengths
from inflight.scheduling.waiting_queue import QueueKey

KEY: QueueKey = (PriorityClass.INTERACTIVE, "a")
OTHER: QueueKey = (PriorityClass.INTERACTIVE, "b")


def survival(lengths: OutputLengths, key: QueueKey, num_tokens: int) -> float:
    rows = np.array([lengths.row_of(key)], np.int32)
    return float(lengths.survival(rows, np.array([num_tokens], np.int32))[0])


def learn(lengths: OutputLengths, key: QueueKey, found: list[int], is_cut: bool = False) -> None:
    for num_tokens in found:
        lengths.observe(key, num_tokens, is_cut)


@pytest.mark.parametrize("mean", [30, 400, 5000])
def test_survival_is_the_share_of_longer_outputs(mean: int) -> None:
    drawn = np.random.default_rng(0).exponential(mean, 1000).astype(int)
    lengths = OutputLengths()
    learn(lengths, KEY, drawn.tolist())
    for num_tokens in (mean // 4, mean, 2 * mean):
        share = float((drawn > num_tokens).mean())
        # A bin's width is a twelfth of its length at most.
        assert survival(lengths, KEY, num_tokens) == pytest.approx(share, abs=0.06)


def test_outputs_that_were_cut_could_have_been_longer() -> None:
    drawn = np.random.default_rng(0).exponential(400, 2000).astype(int)
    lengths = OutputLengths()
    for index, num_tokens in enumerate(drawn.tolist()):
        most = 200 if index % 2 else 10_000
        lengths.observe(KEY, min(num_tokens, most), is_cut=num_tokens >= most)
    assert survival(lengths, KEY, 600) == pytest.approx(float((drawn > 600).mean()), abs=0.06)


def test_beyond_what_was_seen_half_of_those_reach_twice_the_length() -> None:
    lengths = OutputLengths()
    learn(lengths, KEY, [100] * MIN_SAMPLES)
    ratio = survival(lengths, KEY, 2000) / survival(lengths, KEY, 1000)
    assert ratio == pytest.approx(0.5, abs=0.01)
    assert survival(lengths, KEY, 1 << 20) > 0.0


def test_a_tenant_has_the_lengths_of_all_until_it_has_enough_of_its_own() -> None:
    lengths = OutputLengths()
    learn(lengths, KEY, [20] * MIN_SAMPLES)
    assert survival(lengths, OTHER, 50) < 0.05
    learn(lengths, OTHER, [900] * (MIN_SAMPLES - 1))
    assert survival(lengths, OTHER, 50) == pytest.approx(0.5, abs=0.05)
    learn(lengths, OTHER, [900])
    assert survival(lengths, OTHER, 50) > 0.95
    assert survival(lengths, KEY, 50) < 0.05


def test_lengths_are_known_once_enough_requests_have_ended() -> None:
    lengths = OutputLengths()
    learn(lengths, KEY, [5] * (MIN_SAMPLES - 1))
    assert not lengths.is_known
    learn(lengths, OTHER, [5])
    assert lengths.is_known


def test_former_lengths_are_forgotten() -> None:
    lengths = OutputLengths()
    learn(lengths, KEY, [2000] * 3000)
    learn(lengths, KEY, [20] * 3000)
    assert survival(lengths, KEY, 100) < 0.1
    assert lengths.mean == pytest.approx(20, rel=6)


def test_the_tenant_of_the_oldest_request_is_forgotten() -> None:
    lengths = OutputLengths()
    learn(lengths, KEY, [900] * MIN_SAMPLES)
    learn(lengths, OTHER, [20] * 1000)
    rows = {lengths.row_of((PriorityClass.BATCH, str(index))) for index in range(MAX_KEYS)}
    assert len(rows) == MAX_KEYS
    assert CERTAIN not in rows
    assert survival(lengths, KEY, 100) < 0.1, "that of all"


def test_certain_outputs_never_end_before_their_limit() -> None:
    lengths = OutputLengths()
    learn(lengths, KEY, [5] * 100)
    rows = np.array([CERTAIN], np.int32)
    assert lengths.survival(rows, np.array([100_000], np.int32))[0] == 1.0
