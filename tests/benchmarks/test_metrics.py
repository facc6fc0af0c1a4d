"""The benchmark of the metrics runs the engine with each of its recorders."""

from __future__ import annotations

import pytest

import metrics


def test_each_recorder_serves_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(metrics.OUTPUT_LEN, "echo", 8)
    bench = metrics.Bench("echo", threads=1)
    runs = [bench.run(True), bench.run(False), bench.run(True, is_timed=True)]
    assert len({run.num_steps for run in runs}) == 1
    assert bench.timed.seconds > 0
