"""`inflight bench engine` on a CPU, with a model of a few kilobytes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from inflight.checkpoint.locate import Checkpoint
from inflight.cli.bench import engine
from inflight.cli.bench.rows import Row
from inflight.cli.bench.start import Phases

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bench(inflight: Run, tiny_llama: Checkpoint) -> Run:
    model = ["--model", str(tiny_llama.path), "--device", "cpu", "--set", "num_threads=1"]
    return partial(inflight, "bench", "engine", *model)


def test_rows_and_the_start_are_measured(bench: Run):
    status, out, _ = bench("--rows", "3x5/4,2x9/1,start", "--json")
    assert status == 0
    *so_far, report = map(json.loads, out.splitlines())
    decode, prefill, cold, warm = report["rows"]
    # An interrupted run has the results up to then.
    assert [one["rows"] for one in so_far] == [[decode, cold, warm], report["rows"]]
    best = min(decode["seconds"])
    assert 12 / (best + 5e-5) <= decode["out_tok_s"] + 0.01  # seconds are rounded to 0.1 ms
    assert decode["out_tok_s"] - 0.01 <= 12 / (best - 5e-5)
    assert len(decode["seconds"]) == 2
    assert prefill["prompt_tok_s"] > 0
    assert [row["metric"] for row in report["rows"]] == [
        "out_tok_s",
        "prompt_tok_s",
        "ready_s",
        "ready_s",
    ]
    assert (cold["workload"], warm["workload"]) == ("cold kernel cache", "warm kernel cache")
    assert 0 < cold["phases"]["weights"] < cold["ready_s"] < cold["first_token_s"]
    assert report["facts"]["num_blocks"] > 0
    assert report["settings"]["enable_prefix_caching"] is False


@pytest.mark.parametrize("setting", ["none", "int8"])
def test_rows_name_the_format_of_linear_layers(bench: Run, setting: str):
    status, out, _ = bench(
        "--rows", "1x5/4", "--runs", "1", "--json", "--set", f"quantization={setting}"
    )
    assert status == 0
    (row,) = json.loads(out.splitlines()[-1])["rows"]
    assert row["quant"] == setting


def test_rows_scale_and_are_shown_in_lines(bench: Run):
    status, out, _ = bench("--rows", "chat256", "--scale", "0.02", "--runs", "1")
    assert status == 0
    assert "chat256  5 x 10/5" in out
    assert "KV cache: " in out


def test_a_row_that_does_not_fit_is_refused_before_anything_runs(bench: Run):
    status, _, err = bench("--rows", "2x5/4,long")
    assert status == 1
    assert "row long: 8448 tokens exceed the context of 256" in err


@pytest.mark.parametrize(
    "arguments", [["--scale", "0"], ["--runs", "0"], ["--rows", "start", "--profile", "x"]]
)
def test_options_that_make_no_sense_are_refused(bench: Run, arguments: list[str]):
    status, _, err = bench(*arguments)
    assert status == 2
    assert "Error" in err


def test_a_profile_is_a_table_a_file_and_a_picture(bench: Run, tmp_path: Path):
    folder = tmp_path / "profile"
    status, out, _ = bench("--rows", "3x5/4", "--profile", str(folder), "--steps", "3")
    assert status == 0
    assert "no kernel runs" in out
    found = json.loads((folder / "profile.json").read_text())
    decode, prefill = found["steps"]
    assert (decode["kind"], prefill["kind"]) == ("decode", "prefill")
    assert decode["num_steps"] == 3
    for step in (decode, prefill):
        assert sum(step["groups"].values()) == pytest.approx(step["step_us"], rel=0.01)
        assert step["groups"]["linear"] > 0
        # Two layers of attention per step, in as many steps as were counted.
        attention = [kernel for kernel in step["kernels"] if kernel["group"] == "attention"]
        assert sum(kernel["calls"] for kernel in attention) % 2 == 0
    assert (folder / "profile.svg").read_text().startswith("<svg")
    assert (folder / "decode.trace.json").exists()


def test_several_rows_are_profiled_into_folders_of_their_own(bench: Run, tmp_path: Path):
    status, _, _ = bench("--rows", "1x5/4,2x5/4", "--profile", str(tmp_path), "--steps", "2")
    assert status == 0
    assert {path.parent.name for path in tmp_path.glob("*/profile.json")} == {"1x5_4", "2x5_4"}


def test_a_profile_needs_room_for_its_steps(bench: Run, tmp_path: Path):
    status, _, err = bench("--rows", "1x100/4", "--profile", str(tmp_path), "--steps", "100")
    assert status == 1
    assert "need room for" in err


def test_a_runners_timings_replace_those_from_progress_reports():
    phases = Phases()
    phases.seconds = {"imports": 1.0, "weights": 9.0}
    phases.refine({})
    assert phases.seconds == {"imports": 1.0, "weights": 9.0}
    phases.refine({"weights": 3.0, "graphs": 4.0})
    assert phases.seconds == {"imports": 3.0, "weights": 3.0, "graphs": 4.0}


def test_settings_suit_the_rows(tiny_llama: Checkpoint, tmp_path: Path):
    rows = [Row("a", 1, 1, 1), Row("b", 1000, 1, 1)]
    found = engine.engine_settings(str(tiny_llama.path), "cpu", rows, {"block_size": 32})
    assert (found["max_num_seqs"], found["max_num_batched_tokens"]) == (1024, 8192)
    assert found["block_size"] == 32
    assert "random_weights" not in found
    (tmp_path / "config.json").write_text("{}")
    bare = engine.engine_settings(str(tmp_path), "cpu", rows[:1], {})
    assert (bare["max_num_seqs"], bare["random_weights"]) == (256, True)


def test_torch_is_imported_by_the_engine_alone():
    """What it reads from the environment on import must be set before (see `runner.build`)."""
    modules = "inflight.cli.bench.engine, inflight.cli.bench.profile, inflight.cli.bench.show"
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_warm_up_is_short_and_of_the_rows_shape():
    assert engine.warm_up(Row("a", 256, 512, 256)) == Row("a", 32, 512, 4)
    assert engine.warm_up(Row("a", 2, 50000, 1)) == Row("a", 1, 50000, 1)
