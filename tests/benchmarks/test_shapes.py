"""The benchmark of several models' shapes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import result
import shapes
import table
import tiny
from inflight.cli.bench.rows import ROWS, START, select
from inflight.errors import ConfigError
from inflight.models.gpu_support import gpu_obstacle
from inflight.models.spec import MoeSpec
from kernels import timing
from roofline import Ceilings

GPU = shapes.Gpu("NVIDIA H200", "2.11", 150_000_000_000, Ceilings(4e12, 700e12))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A shape of a few kilobytes, with bars."""
    folder = tmp_path / "tiny-qwen3"
    folder.mkdir()
    config = {**tiny.SETTINGS, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    config.pop("mlp_bias")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "rows.json").write_text('{"few": "3x5/4", "prefill": "2x9/1"}')
    peers = {"peer": "p", "rows": {"few": {"none": {"peer": 0.5, "must": 0.5}}}}
    (folder / "bars-h200.json").write_text(json.dumps(peers))
    return folder


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["shapes.py", *map(str, arguments)])
    shapes.main()


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize(
    ("name", "parameters", "kv_bytes", "context"),
    # Of the checkpoints: Gemma's without the vision tower of 421 million.
    [
        ("llama-3.1-8b", 8_030_261_248, 131_072, 131_072),
        ("qwen3-8b", 8_190_735_360, 147_456, 40_960),
        ("gemma-3-12b", 11_766_034_176, 393_216, 131_072),
        ("gpt-oss-20b", 20_914_757_184, 49_152, 131_072),
        ("deepseek-v2-lite", 15_706_484_224, 31_104, 163_840),
    ],
)
def test_a_shape_has_the_published_numbers(name: str, parameters: int, kv_bytes: int, context: int):
    spec = shapes.load(name).spec
    vectors = spec.hidden_size
    for layer in spec.layers:
        attention, mlp = layer.attention, layer.mlp
        vectors += (4 if layer.post_norms else 2) * spec.hidden_size
        vectors += 2 * attention.head_dim if attention.qk_norm else 0
        latent = attention.latent
        vectors += latent.rank + latent.q_rank if latent else 0
        vectors += attention.q_width + 2 * attention.kv_width if attention.qkv_bias else 0
        vectors += spec.hidden_size if attention.out_bias else 0
        vectors += attention.num_heads if attention.sinks else 0
        if isinstance(mlp, MoeSpec):
            biases = 2 * mlp.expert.width + spec.hidden_size if mlp.expert.bias else 0
            vectors += mlp.num_experts * (mlp.router_bias + biases)
    assert spec.matrix_elements + vectors == parameters
    assert spec.kv_layout("bfloat16").block_bytes(1) == kv_bytes
    assert spec.max_position_embeddings == context


def test_the_shape_of_qwen_has_norms_of_heads_and_no_window():
    (attention,) = shapes.load("qwen3-8b").spec.attentions
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (32, 8, 128)
    assert (attention.qk_norm, attention.window, attention.qkv_bias) == ("head", 0, False)
    assert (attention.rope.theta, attention.rope.type) == (1e6, "default")


def test_the_shape_of_gemma_has_a_window_in_five_of_six_layers():
    spec = shapes.load("gemma-3-12b").spec
    windows = [layer.attention.window for layer in spec.layers]
    assert windows == [1024, 1024, 1024, 1024, 1024, 0] * 8
    sliding, full = spec.attentions
    assert sliding.scale == full.scale == 256**-0.5
    assert (sliding.rope.theta, full.rope.theta, full.rope.factor) == (1e4, 1e6, 8)
    assert spec.tie_word_embeddings


def test_the_shape_of_gpt_oss_has_sinks_and_a_window_in_every_second_layer():
    spec = shapes.load("gpt-oss-20b").spec
    assert [layer.attention.window for layer in spec.layers] == [128, 0] * 12
    sliding, full = spec.attentions
    assert sliding.sinks and full.sinks
    assert sliding.rope == full.rope
    assert (full.rope.type, full.rope.factor, full.rope.truncate) == ("yarn", 32, False)
    (mlp,) = {layer.mlp for layer in spec.layers}
    assert isinstance(mlp, MoeSpec)
    assert (mlp.num_experts, mlp.top_k, mlp.expert.width) == (32, 4, 2880)
    assert gpu_obstacle(spec) is None


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-8b"])
def test_gpus_run_the_shapes_that_have_bars(name: str):
    shape = shapes.load(name)
    assert shape.bars.rows
    assert gpu_obstacle(shape.spec) is None


@pytest.mark.parametrize("name", shapes.names())
def test_bars_are_of_rows_of_their_shape(name: str):
    shape = shapes.load(name)
    own = set(shape.workloads) or {START, *(row.name for row in ROWS)}
    assert set(shape.bars.rows) <= own
    rows, _ = select(shape.select("all"))
    assert {shape.row_name(row.name) for row in rows} == own - {START}


def test_a_shape_without_rows_has_those_of_the_command():
    llama, qwen = shapes.load("llama-3.1-8b"), shapes.load("qwen3-8b")
    assert llama.select("all") == "all"
    assert llama.row_name("bs1") == "bs1"
    assert qwen.select("bs1,chat256,long,2x3/4") == "1x128/256,chat256,long,2x3/4"
    assert qwen.row_name("1x128/256") == "bs1"


def test_an_unknown_shape_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match="'qwen' is unknown; allowed: deepseek-v2-lite, gemma-3"):
        shapes.load("qwen")


def test_a_shape_is_measured_on_a_cpu_with_its_bars_and_roofline(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    folder: Path,
):
    options = ("--device", "cpu", "--set", "num_threads=1", "--ceilings", "0.01,0.1")
    run(monkeypatch, "--shape", folder, *options, "--results", tmp_path)
    found = read(tmp_path / "engine-cpu-tiny-qwen3.json")
    assert found["benchmark"] == "engine, tiny-qwen3"
    assert found["settings"]["random_weights"]
    assert found["ceilings"] == {"tb_per_s": 0.01, "tflop_per_s": 0.1}
    few, prefill = found["rows"]
    assert (few["row"], few["workload"], few["must"]) == ("few", "3 x 5/4", 0.5)
    assert (prefill["row"], prefill["metric"]) == ("prefill", "prompt_tok_s")
    assert few["of_peer"] == pytest.approx(few["out_tok_s"] / 0.5, abs=1e-3)
    for row in (few, prefill):
        share = row[row["metric"]] / row["roofline"]
        assert row["of_roofline"] == pytest.approx(share, abs=1e-3)
    printed = capsys.readouterr().out
    assert "of roofline" in printed
    assert printed.splitlines()[-1] == "peer: p"
    # The form of other results, with two facts and two figures of a row more.
    known = read(shapes.HERE / "results/engine-h200.json")
    assert set(found) == {*known, "kv_cache", "ceilings"}
    fields = set(next(row for row in known["rows"] if row["row"] == "prefill"))
    bars = {"peer", "must", "goal", "limit", "of_peer"}
    assert set(prefill) == fields - bars | {"roofline", "of_roofline"}


def test_a_shape_that_gpus_refuse_is_reported_after_another_that_failed(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    folder: Path,
):
    monkeypatch.setattr(shapes, "find_gpu", lambda: GPU)
    monkeypatch.setattr(
        shapes, "gpu_obstacle", lambda spec: "windows" if spec.vocab_size > 999 else None
    )
    monkeypatch.setattr(result, "gpu", lambda: {"gpu": GPU.name})
    with pytest.raises(SystemExit, match=r"failed: tiny-qwen3"):
        run(monkeypatch, "--shape", folder, "--shape", "gemma-3-12b", "--results", tmp_path)
    printed = capsys.readouterr().out
    assert "gemma-3-12b: not measured: windows" in printed
    found = read(tmp_path / "engine-h200-gemma-3-12b.json")
    assert [row["row"] for row in found["rows"]] == ["bs1", "bs64"]
    assert all(row["refused"] == "windows" for row in found["rows"])
    # 23.5 GB of weights a step, and some KV, at 4 TB/s.
    assert 1e3 / found["rows"][0]["roofline"] == pytest.approx(23.53e9 / 4e12 * 1e3, rel=0.01)
    assert found["kv_cache"]["sequences"] == 126
    assert found["kv_cache"]["sequences_without_freed_windows"] == 35
    assert "| bs64 | 64 x 16/256 | none | refused |" in table.table(found)


def test_the_ceilings_of_a_gpu_are_read_in_bytes_and_flops(monkeypatch: pytest.MonkeyPatch):
    microsecond = timing.Timing(1.0, 1.0, 1.0, cold=True)
    rows = [microsecond.row(num_bytes=4_200_000), microsecond.row(flops=700_000_000)]
    output = json.dumps({"gpu": "G", "torch": "2", "memory_bytes": 5, "rows": rows})
    done = subprocess.CompletedProcess([], 0, stdout=output.encode())
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: done)
    assert shapes.find_gpu() == shapes.Gpu("G", "2", 5, Ceilings(4.2e12, 700e12))


def test_a_machine_without_a_gpu_has_no_ceilings(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    timing.main()
    done = subprocess.CompletedProcess([], 0, stdout=capfdbinary.readouterr().out)
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: done)
    assert shapes.find_gpu() is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is no GPU; allowed: cpu"),
        (["--shape", "qwen"], "--shape: 'qwen' is unknown"),
        (["--model=m"], "--model=m: use benchmarks/engine.py"),
        (["--profile", "d"], "--profile: use benchmarks/engine.py"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
):
    monkeypatch.setattr(shapes, "find_gpu", lambda: None)
    with pytest.raises(SystemExit):
        run(monkeypatch, *arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("text", ["4", "4,0", "a,b", "1,2,3"])
def test_ceilings_are_two_positive_numbers(text: str):
    with pytest.raises(ValueError):
        shapes.read_ceilings(text)
