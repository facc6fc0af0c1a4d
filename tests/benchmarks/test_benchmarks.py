"""The scripts in benchmarks/ that aggregate results."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tokenizers

import table
from inflight.checkpoint.locate import locate
from inflight.cli.bench.serving.workload.prompts import MIN_WORDS
from inflight.cli.bench.serving.workload.words import WORDS
from inflight.models.registry import read_spec
from inflight.text.tokenizer import Tokenizer

ROOT = Path(table.__file__).parents[1]
MODEL = ROOT / "benchmarks/models/llama-3.1-8b"


def load_script(name: str) -> ModuleType:
    """By path: a module of the tests has the same name."""
    spec = importlib.util.spec_from_file_location(f"bench_{name}", ROOT / f"benchmarks/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


serving = load_script("serving")
speculation = load_script("speculation")


@pytest.mark.parametrize("vocab_size", [512, 20_000, 128_256])
def test_words_of_the_synthetic_tokenizer_are_one_token_each(vocab_size: int):
    made, words = serving.make_tokenizer(vocab_size)
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(made))
    assert tokenizer.get_vocab_size() == vocab_size
    prompt = words[:: max(1, len(words) // 500)]
    ids = tokenizer.encode("".join(prompt)).ids
    assert len(ids) == len(prompt)
    assert tokenizer.decode(ids) == "".join(prompt)


def test_the_synthetic_tokenizer_has_enough_english_words_for_load_tests():
    made, _ = serving.make_tokenizer(128_256)
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(made))
    single = [word for word in WORDS if len(tokenizer.encode(f" {word}").ids) == 1]
    assert len(single) >= MIN_WORDS
    assert len(set(WORDS)) == len(WORDS)


def test_a_vocabulary_too_small_for_words_is_refused():
    with pytest.raises(SystemExit, match="160 tokens"):
        serving.make_tokenizer(160)


def test_a_model_gets_a_tokenizer_beside_its_files(tmp_path: Path):
    words = serving.make_model(MODEL, tmp_path / "model")
    checkpoint = locate(str(tmp_path / "model"))
    tokenizer = Tokenizer.load(checkpoint)
    assert tokenizer.vocab_size == read_spec(checkpoint).vocab_size == 128256
    assert len(tokenizer.encode("".join(words[-512:]))) == 512


def test_the_fronts_options_change_the_repository(tmp_path: Path):
    for name in ("llm", "detokenizer"):
        (tmp_path / name).mkdir()
        source = ROOT / "model_repository" / name / "config.pbtxt"
        (tmp_path / name / "config.pbtxt").write_text(source.read_text())
    serving.Fronts(llm=3, detokenizer=2, sender_threads=16).apply(tmp_path)
    llm = (tmp_path / "llm/config.pbtxt").read_text()
    assert "KIND_CPU count: 3" in llm
    assert 'key: "sender_threads" value { string_value: "16" }' in llm
    assert "preserve_ordering: true }\n" in (tmp_path / "detokenizer/config.pbtxt").read_text()


def rows(llm: float, generate: float, extra_us: float) -> list[dict[str, Any]]:
    found = []
    speeds = {"engine": 1000.0, "llm": llm, "generate": generate}
    for name, speed in speeds.items():
        found.append({"row": name, "streams": 256, "out_tok_s": speed, "ms_per_token": 1.0})
        ms = 4.0 if name == "engine" else 4.0 + extra_us / 1e3
        found.append({"row": name, "streams": 1, "out_tok_s": 1e3 / ms, "ms_per_token": ms})
    serving.compare(found, with_peer=True)
    return found


@pytest.mark.parametrize(
    ("llm", "generate", "extra_us", "verdicts"),
    [
        (949, 899, 301, ["below", "below", "below", "below"]),
        (950, 900, 299, ["must", "must", "must", "must"]),
        (990, 970, 100, ["must", "must", "goal", "must"]),
    ],
)
def test_serving_is_rated_by_its_share_and_by_time_per_token(
    llm: float, generate: float, extra_us: float, verdicts: list[str]
):
    found = [row for row in rows(llm, generate, extra_us) if row["row"] != "engine"]
    assert [row["verdict"] for row in found] == verdicts
    assert found[2]["share"] == generate / 1000
    assert found[3]["extra_us"] == pytest.approx(extra_us)
    assert found[2]["vllm_backend"] == 5041.0


def test_an_export_gives_the_time_of_all_and_the_wait_for_the_first_response(tmp_path: Path):
    requests = [
        {"timestamp": 1_000_000_000, "response_timestamps": [1_050_000_000, 2_000_000_000]},
        {"timestamp": 1_001_000_000, "response_timestamps": [1_071_000_000, 3_000_000_000]},
    ]
    path = tmp_path / "export.json"
    path.write_text(json.dumps({"experiments": [{"requests": requests}]}))
    assert serving.read_export(path, 2) == {"seconds": 2.0, "ttft_ms": 60.0}
    with pytest.raises(SystemExit, match="2 requests, not 3"):
        serving.read_export(path, 3)


def copy_row(name: str, seconds: float, drafted_seconds: float, parts_at: int | None = None) -> Any:
    """Two runs each without and with drafts, the last of which parts from the others."""
    ids = list(range(speculation.OUTPUT_LEN))
    other = list(ids)
    if parts_at is not None:
        other[parts_at] = -1
    plain, drafted = 0, speculation.AUTO_DRAFTS
    return speculation.CopyRow(
        name,
        outputs={plain: [ids, ids], drafted: [ids, other]},
        seconds={plain: [seconds + 1, seconds], drafted: [drafted_seconds, drafted_seconds + 1]},
        num_accepted=53,
    )


def test_a_copied_text_counts_if_all_runs_produced_equal_ids():
    cells = copy_row("quote", 6.0, 3.0).cells()
    assert cells["speed_up"] == 2.0
    assert cells["tokens_per_step"] == 1.5
    assert (cells["shared_prefix"], cells["counted"]) == ("160/160", "yes")


@pytest.mark.parametrize("parts_at", [0, 17, 159])
def test_a_copied_text_of_different_ids_has_no_speed_up(parts_at: int):
    cells = copy_row("list", 6.0, 1.0, parts_at).cells()
    assert "speed_up" not in cells
    assert (cells["shared_prefix"], cells["counted"]) == (f"{parts_at}/160", "not counted")


def test_the_mean_of_copying_is_over_counted_rows():
    rows = [
        copy_row("quote", 6.0, 3.0),
        copy_row("code", 4.0, 2.0),
        copy_row("list", 9.0, 1.0, parts_at=17),
    ]
    expected = {"row": "all", "speed_up": 2.0, "counted": "2 of 3 rows", "must": 1.8}
    assert speculation.mean("all", rows, 1.8) == expected
    assert speculation.mean("all", rows[2:]) == {"row": "all", "counted": "0 of 1 rows"}


def test_methods_are_compared_by_the_rows_that_both_count_with_equal_ids():
    first = [copy_row("quote", 6.0, 4.0), copy_row("code", 4.0, 3.0), copy_row("list", 9.0, 1.0)]
    second = [
        copy_row("quote", 6.0, 2.0),
        copy_row("code", 4.0, 1.0, parts_at=17),
        copy_row("list", 9.0, 0.5),
    ]
    for ids in (ids for runs in second[2].outputs.values() for ids in runs):
        ids[3] = -1  # equal among themselves, but not to the other method's
    expected = {"row": "all", "speed_up": 2.0, "counted": "1 of 3 rows"}
    assert speculation.compare("all", first, second) == expected
    assert speculation.compare("all", first[1:], second[1:]) == {
        "row": "all",
        "counted": "0 of 2 rows",
    }


ENGINE = {
    "benchmark": "engine",
    "machine": {"gpu": "a GPU", "cores": 16},
    "versions": {"torch": "2.11"},
    "commit": "abc",
    "start": {"imports": 2.0, "graphs": 1.0},
    "facts": {"num_blocks": 5, "block_size": 16, "in_use": 0.9, "free_gib": 14.0},
    "peer": "vLLM",
    "rows": [
        {
            "row": "bs64",
            "workload": "64 x 16/500",
            "quant": "none",
            "metric": "out_tok_s",
            "out_tok_s": 12000.0,
            "seconds": [1.0],
            "must": 10792,
            "peer": 10792,
            "of_peer": 1.11,
        }
    ],
}


def test_a_table_of_the_engine_shows_bars_and_facts():
    lines = table.table(ENGINE).splitlines()
    assert lines[0] == "### engine"
    assert "Commit abc; a GPU, 16 cores; torch 2.11." in lines
    assert any("90.0% in use" in line and "3.00 s" in line for line in lines)
    assert (
        "| bs64 | 64 x 16/500 | none | 12,000 | out tok/s | 10,792 | 10,792 | 1.11 x | must |"
        in (lines)
    )
    assert lines[-1] == "Peer: vLLM."


def test_a_table_leaves_lists_in_the_file():
    result = ENGINE | {"benchmark": "serving", "rows": [{"row": "llm", "share": 0.9, "s": [1]}]}
    del result["facts"]
    assert "| row | share |" in table.table(result).splitlines()
