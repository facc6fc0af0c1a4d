"""The engine and the ensemble under the same arrivals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import poisson
from bench_reports import steady_level
from inflight.cli.bench.serving.results.slo import parse
from small_checkpoint import write

SLO = parse("ttft=500,tpot=30")
FAST, SLOW = 0.1, 1.0  # longest TTFTs, in seconds


def test_the_ensemble_has_its_share_of_the_engines_goodput_and_highest_rate() -> None:
    own = [steady_level(rate, FAST, SLO) for rate in (2, 4, 8)]
    served = [steady_level(2, FAST, SLO), steady_level(4, FAST, SLO), steady_level(8, SLOW, SLO)]
    *rows, last = poisson.compare(own, served)
    assert [(one["row"], one["rate"], one["meets_slo"]) for one in rows[3:]] == [
        ("generate", 2, "yes"),
        ("generate", 4, "yes"),
        ("generate", 8, "no"),
    ]
    assert [one.get("share") for one in rows] == [None, None, None, 1.0, 1.0, 0.5]
    assert last == {"row": "highest rate", "engine": 8, "generate": 4, "share": 0.5}
    assert rows[0]["ttft_p99"] == pytest.approx(99.0, abs=1)


def test_without_a_rate_that_meets_the_objective_there_is_no_share() -> None:
    *_, last = poisson.compare([steady_level(2, SLOW, SLO)], [steady_level(2, SLOW, SLO)])
    assert last == {"row": "highest rate"}


def test_the_search_of_the_ensemble_begins_where_that_of_the_engine_ended() -> None:
    levels = [steady_level(2, FAST, SLO), steady_level(3, FAST, SLO), steady_level(4, SLOW, SLO)]
    assert poisson.server_rates("auto", levels) == "auto:3"
    assert poisson.server_rates("auto:9", levels[2:]) == "auto:4"
    assert poisson.server_rates("1,2", levels) == "1,2"


def test_a_result_of_the_engine_alone_is_a_file_of_rows(tmp_path: Path) -> None:
    model, written = write(tmp_path / "model"), tmp_path / "result.json"
    script = Path(poisson.__file__)
    done = subprocess.run(
        [
            *(sys.executable, script, "--engine-only", "--model", model, "--device", "echo"),
            *("--rate", "50", "--requests", "10", "--ramp", "0.1", "--scale", "0.1"),
            *("--slo-ttft-ms", "60000", "--slo-tpot-ms", "60000", "--result", written),
            *("--set", "num_blocks=4096", "--html", tmp_path / "pages"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(written.read_text())
    only, last = result["rows"]
    assert (only["row"], only["rate"], only["requests"]) == ("engine", 50.0, 10)
    assert last == {"row": "highest rate", "engine": 50.0}
    assert result["settings"]["num_blocks"] == 4096
    assert (tmp_path / "pages/engine.html").exists()
