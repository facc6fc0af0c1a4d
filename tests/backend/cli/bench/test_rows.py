"""The workloads, and the metrics computed from their time."""

from __future__ import annotations

import pytest

from inflight.cli.bench.rows import ROWS, Row, select
from inflight.errors import ConfigError


def test_names_rows_of_ones_own_and_the_start_are_selected():
    rows, start = select("bs64,start,3x20/5")
    assert [row.workload for row in rows] == ["64 x 16/500", "3 x 20/5"]
    assert start
    rows, start = select("prefill")
    assert not start


def test_all_is_every_row_and_the_start():
    rows, start = select("all")
    assert (tuple(rows), start) == (ROWS, True)


@pytest.mark.parametrize("name", ["bs65", "", "3x20", "0x20/5", "3x20/0"])
def test_an_unknown_row_is_refused_by_name(name: str):
    with pytest.raises(ConfigError, match=f"'{name}' is unknown"):
        select(name)


def test_figures_are_those_of_the_best_run():
    figures = Row("row", num_requests=4, input_len=10, output_len=50).figures([2.0, 2.5])
    assert figures == {
        "out_tok_s": 100.0,
        "ms_per_token": 40.0,
        "total_tok_s": 120.0,
        "spread": 25.0,
        "seconds": [2.0, 2.5],
    }


def test_a_row_of_one_output_token_is_about_its_prompts():
    row = Row("prefill", num_requests=4, input_len=100, output_len=1)
    assert row.metric == "prompt_tok_s"
    figures = row.figures([2.0])
    assert figures["prompt_tok_s"] == 200.0
    assert "ms_per_token" not in figures


def test_scaling_keeps_a_row_runnable_and_prefill_prefill():
    for row in ROWS:
        small = row.scaled(0.001)
        assert min(small.num_requests, small.input_len) >= 1
        assert small.metric == row.metric
    assert Row("row", 64, 16, 500).scaled(0.5) == Row("row", 32, 8, 250)


def test_requests_are_deterministic_greedy_and_ignore_eos():
    row = Row("row", num_requests=3, input_len=7, output_len=5)
    requests = row.requests(vocab_size=30, first_id=11)
    assert [request.request_id for request in requests] == [11, 12, 13]
    assert [request.prompt_ids for request in requests] == [
        request.prompt_ids for request in row.requests(vocab_size=30, first_id=1)
    ]
    for request in requests:
        assert len(request.prompt_ids) == 7
        assert all(0 <= token < 30 for token in request.prompt_ids)
        assert request.params.effective_temperature == 0.0
        assert (request.params.ignore_eos, request.params.max_tokens) == (True, 5)
