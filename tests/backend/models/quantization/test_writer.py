"""Folders with weights of 8 and 4 bits are written in a form that others read, too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, Phi3Config, Qwen3Config

import family
import tiny
from inflight.checkpoint import safetensors
from inflight.checkpoint.locate import Checkpoint
from inflight.errors import ConfigError
from inflight.models.loader import linear_names, weight_shapes
from inflight.models.quantization import writer
from inflight.models.quantization.writer import quantize_folder
from inflight.models.registry import read_spec
from inflight.models.stored.weights import Weights, open_weights

MODELS = {
    "qwen3": Qwen3Config(**family.SHAPE),
    "phi3, fused and tied": Phi3Config(
        **family.SHAPE | {"head_dim": 16, "tie_word_embeddings": True}, pad_token_id=0
    ),
}


def opened(folder: Path) -> Weights:
    checkpoint = Checkpoint(folder, "huggingface")
    spec = read_spec(checkpoint)
    return open_weights(checkpoint, spec, weight_shapes(spec))


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("config", MODELS.values(), ids=list(MODELS))
def test_transformers_reads_the_same_weights(tmp_path: Path, config: Any, kind: str) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    checkpoint = family.write_folder(family.make(config), source)
    names = linear_names(read_spec(checkpoint))
    written = quantize_folder(source, target, names, kind)
    assert written.num_quantized == len(names)
    assert written.bytes_after < 0.6 * written.bytes_before
    ours = opened(target)
    as_read = CompressedTensorsConfig(dequantize=True)
    with pytest.warns(UserWarning, match="loading attributes"):
        theirs = AutoModelForCausalLM.from_pretrained(
            target, dtype=torch.float32, quantization_config=as_read
        ).state_dict()
    before = opened(source)
    assert written.num_tensors == len(before.shapes)
    for name in before.shapes:
        torch.testing.assert_close(ours.read(name), theirs[name], rtol=1e-6, atol=0)
        assert torch.equal(ours.read(name), before.read(name)) == (name not in names)


def test_the_reference_package_dequantises_the_same(tmp_path: Path) -> None:
    """Groups of 128 columns, and of 64 and 32 where the width asks for them."""
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationConfig

    source, target = tmp_path / "in", tmp_path / "out"
    changes = {"hidden_size": 192, "intermediate_size": 96, "num_hidden_layers": 1}
    model = family.make(Qwen3Config(**family.SHAPE | changes)).bfloat16()
    checkpoint = family.write_folder(model, source)
    names = linear_names(read_spec(checkpoint))
    quantize_folder(source, target, names, "int4")
    config = json.loads((target / "config.json").read_text())["quantization_config"]
    schemes = QuantizationConfig.model_validate(config).config_groups.values()
    assert sorted(scheme.weights.group_size for scheme in schemes) == [32, 64, 128]
    stored, ours = load_file(target / "model.safetensors"), opened(target)
    for scheme in schemes:
        for module in scheme.targets:
            own = {
                f"weight_{part}": stored.pop(f"{module}.weight_{part}")
                for part in ("packed", "scale", "shape")
            }
            assert own["weight_scale"].dtype == torch.bfloat16
            wide = own | {"weight_scale": own["weight_scale"].float()}
            theirs = PackedQuantizationCompressor.decompress(wide, scheme)["weight"]
            assert torch.equal(ours.read(f"{module}.weight"), theirs)
            names.remove(f"{module}.weight")
    assert not names and not any("weight_" in name for name in stored)


def test_widths_without_groups_keep_their_bits(tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    changes = {"intermediate_size": 72, "num_hidden_layers": 1}
    checkpoint = family.write_folder(family.make(Qwen3Config(**family.SHAPE | changes)), source)
    names = linear_names(read_spec(checkpoint))
    written = quantize_folder(source, target, names, "int4")
    assert written.num_quantized == len(names) - 1
    config = json.loads((target / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["lm_head", "model.layers.0.mlp.down_proj"]
    down = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(opened(target).read(down), opened(source).read(down))


def test_int4_needs_a_multiple_of_32_columns(tmp_path: Path) -> None:
    changes = {"hidden_size": 48, "intermediate_size": 72, "head_dim": 12}
    checkpoint = family.write_folder(
        family.make(Qwen3Config(**family.SHAPE | changes)), tmp_path / "in"
    )
    names = linear_names(read_spec(checkpoint))
    with pytest.raises(ConfigError, match="no linear layer has a multiple of 32 columns"):
        quantize_folder(tmp_path / "in", tmp_path / "out", names, "int4")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_shards_keep_their_names_and_other_files_are_copied(tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    checkpoint = tiny.write_llama(source, shards=3)
    (source / "tokenizer_config.json").write_text("{}")
    (source / "pytorch_model.bin").write_text("not needed")
    (source / "folder").mkdir()
    fractions: list[float] = []
    names = linear_names(read_spec(checkpoint))
    quantize_folder(source, target, names, "fp8", fractions.append)
    assert fractions == pytest.approx([1 / 3, 2 / 3, 1.0])
    kept = {path.name for path in source.iterdir()} - {"pytorch_model.bin", "folder"}
    assert {path.name for path in target.iterdir()} == kept
    index = json.loads((target / "model.safetensors.index.json").read_text())
    stored = safetensors.read_folder(target, safetensors.WEIGHTS + safetensors.QUANTIZED)
    assert index["weight_map"].keys() == stored.keys()
    assert set(opened(target).shapes) == set(opened(source).shapes)


def test_a_folder_that_exists_is_not_written_to(tmp_path: Path) -> None:
    checkpoint = tiny.write_llama(tmp_path / "in")
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match=r"out exists; choose another folder"):
        quantize_folder(checkpoint.path, tmp_path / "out", [], "fp8")


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = tiny.write_llama(tmp_path / "in", shards=2)
    calls = []

    def save_file(*args: object) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        original(*args)

    original = writer.save_file
    monkeypatch.setattr(writer, "save_file", save_file)
    with pytest.raises(ConfigError, match=r"out cannot be written \(No space left on device\)"):
        quantize_folder(checkpoint.path, tmp_path / "out", [], "fp8")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
