"""Reference figures of the engine's benchmark."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import bars
import tiny
from bars import Bar
from inflight.cli.bench.rows import ROWS, START
from inflight.errors import ConfigError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SHIPPED = BENCHMARKS / "models/llama-3.1-8b/bars-h200.json"
ROW: dict[str, Any] = {
    "row": "bs64",
    "workload": "64 x 16/500",
    "quant": "none",
    "metric": "out_tok_s",
    "out_tok_s": 12000.0,
    "ms_per_token": 5.333,
    "spread": 1.25,
}


def test_a_figure_that_is_not_known_is_none():
    found = bars.Bars("peer", {"bs1": {"none": Bar(peer=1.0)}})
    assert found.of("bs1", "none") == Bar(peer=1.0)
    assert found.of("bs1", "fp8") == found.of("bs2", "none") == Bar()


@pytest.mark.parametrize("text", ['{"rows": {"bs1": {"none": {"pear": 1}}}}', "[]", "{", "\xff"])
def test_a_file_of_another_form_is_refused(tmp_path: Path, text: str):
    path = tmp_path / "bars.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=str(path)):
        bars.load(path)


def test_a_missing_file_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be read"):
        bars.load(tmp_path / "none.json")


def test_the_shipped_bars_are_in_order():
    found = bars.load(SHIPPED)
    assert set(found.rows) == {START, *(row.name for row in ROWS)}
    for row, by_quant in found.rows.items():
        for bar in by_quant.values():
            steps = [step for step in (bar.must, bar.goal, bar.limit) if step is not None]
            assert steps == sorted(steps, reverse=row == START), row  # of seconds, fewer are better


def test_a_row_is_compared_with_its_own_bars():
    known = bars.Bars("peer", {"bs64": {"none": Bar(peer=10000, must=10000, limit=15000)}})
    found = bars.compare(ROW, known)
    assert found == {**ROW, "peer": 10000, "must": 10000, "limit": 15000, "of_peer": 1.2}
    for other in ({"row": "bs1"}, {"quant": "fp8"}):
        assert bars.compare(ROW | other, known) == ROW | other


def test_fewer_seconds_than_the_peers_are_a_ratio_above_one():
    row = {"row": START, "quant": "none", "metric": "ready_s", "ready_s": 4.0}
    known = bars.Bars("peer", {START: {"none": Bar(peer=6.0)}})
    assert bars.compare(row, known)["of_peer"] == 1.5


def test_a_compared_row_is_shown_with_its_bars():
    known = bars.Bars("", {"bs64": {"none": Bar(peer=10792, must=10792, goal=12346, limit=13900)}})
    cells = bars.cells(bars.compare(ROW, known))
    assert " ".join(cells.values()) == (
        "bs64 64 x 16/500 none 12,000 out tok/s 5.333 1.2 % 10,792 10,792 12,346 13,900 "
        "1.11 x 86% must"
    )
    assert not any(bars.cells(ROW)[name] for name in ("peer", "must", "of peer", "of limit"))


@pytest.mark.parametrize(
    ("metric", "value", "expected"),
    [
        ("out_tok_s", 99, "below"),
        ("out_tok_s", 100, "must"),
        ("out_tok_s", 120, "goal"),
        ("ready_s", 101, "below"),
        ("ready_s", 100, "must"),
    ],
)
def test_lower_is_better_for_times(metric: str, value: float, expected: str):
    row = {"metric": metric, metric: value, "must": 100}
    if metric != "ready_s":
        row["goal"] = 120
    assert bars.verdict(row) == expected


def test_a_result_holds_what_was_measured_and_its_bars(tmp_path: Path):
    tiny.write_llama(tmp_path / "model")
    wanted, written = tmp_path / "bars.json", tmp_path / "result.json"
    wanted.write_text('{"peer": "p", "rows": {"3x5/4": {"none": {"peer": 0.5, "must": 0.5}}}}')
    done = subprocess.run(
        [
            *(sys.executable, BENCHMARKS / "engine.py", "--model", tmp_path / "model"),
            *("--device", "cpu", "--set", "num_threads=1", "--rows", "3x5/4,2x9/1"),
            *("--bars", wanted, "--result", written),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(written.read_text())
    decode, prefill = result["rows"]
    assert decode["of_peer"] == pytest.approx(decode["out_tok_s"] / 0.5, rel=0.01)
    assert decode["must"] == 0.5
    assert "peer" not in prefill
    assert result["peer"] == "p"
    assert "verdict" in done.stdout
    assert done.stdout.splitlines()[-1] == "peer: p"
