"""The format of linear layers follows from the checkpoint and the setting."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Kind

import grouped_folders as folders
import quantized_models
import tiny
import tiny_gguf
from inflight.checkpoint.locate import Checkpoint
from inflight.config import EngineConfig, Quantization
from inflight.errors import ConfigError
from inflight.execution import factory
from inflight.models.loader import linear_names, linear_shapes
from inflight.models.quantization.choice import (
    CpuFormat,
    GpuFormat,
    cpu_format,
    gpu_format,
    kept_in_layers,
    kept_outside_layers,
    linear_format,
    num_quantized,
    num_quantized_on_gpu,
    rounds_weights,
)
from inflight.models.quantization.grouped_memory import KeptValues, rounded_layers
from inflight.models.quantization.recognition import FP8, INT8
from inflight.models.quantization.writer import quantize_folder
from inflight.models.registry import read_spec


def written(folder: Path, kind: str) -> Checkpoint:
    """A checkpoint with linear layers in this format; `none` for 32 bits."""
    checkpoint = tiny.write_llama(folder / "in")
    if kind == "none":
        return checkpoint
    names = linear_names(read_spec(checkpoint))
    quantize_folder(checkpoint.path, folder / kind, names, kind)
    return Checkpoint(folder / kind, "huggingface")


@pytest.mark.parametrize(
    ("stored", "setting", "expected"),
    [
        ("none", "auto", "none"),
        ("none", "none", "none"),
        ("none", "fp8", "fp8"),
        ("none", "int8", "int8"),
        ("none", "int8_hadamard", "int8_hadamard"),
        ("fp8", "auto", "fp8"),
        ("fp8", "none", "none"),
        ("fp8", "fp8", "fp8"),
        ("int8", "auto", "int8"),
        ("int8", "int8", "int8"),
    ],
)
def test_the_setting_precedes_the_checkpoint(
    tmp_path: Path, stored: str, setting: Quantization, expected: str
) -> None:
    checkpoint = written(tmp_path, stored)
    spec = read_spec(checkpoint)
    elements = spec.num_layers * spec.matrix_elements_per_layer
    assert linear_format(checkpoint, setting) == expected
    assert num_quantized(checkpoint, spec, setting) == (0 if expected == "none" else elements)


@pytest.mark.parametrize(
    ("stored", "setting"),
    [("fp8", "int8"), ("int8", "fp8"), ("fp8", "int8_hadamard"), ("int8", "int8_hadamard")],
)
def test_other_values_of_8_bits_are_refused_before_anything_is_loaded(
    tmp_path: Path, stored: str, setting: Quantization
) -> None:
    checkpoint = written(tmp_path, stored)
    config = EngineConfig(model=str(checkpoint.path), quantization=setting)
    message = (
        f"quantization: {setting} is not supported for {checkpoint.path}, whose weights are "
        f"quantised already: {stored.upper()} (compressed-tensors); allowed for it: auto, none, "
        f"{stored}; for {setting}, use the model with weights of 16 bits"
    )
    loaded: list[str] = []
    with pytest.raises(ConfigError, match=re.escape(message)):
        factory.build(config, checkpoint, lambda what, fraction: loaded.append(what))
    assert "weights" not in loaded


# ---------------------------------------------------------------- 4 bits


def in_groups(folder: Path, config: dict[str, Any]) -> Checkpoint:
    """A checkpoint with this quantization_config, and tensors that nobody reads."""
    checkpoint = tiny.write_llama(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    return checkpoint


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}
GPTQ_8 = {"quant_method": "gptq", "bits": 8, "group_size": 32}
MXFP4 = {"quant_method": "mxfp4"}


@pytest.mark.parametrize(("config", "name"), [(AWQ, "int4"), (GPTQ_8, "int8"), (MXFP4, "mxfp4")])
def test_groups_stay_unless_the_setting_dequantises_them(
    tmp_path: Path, config: dict[str, Any], name: str
) -> None:
    checkpoint = in_groups(tmp_path, config)
    spec = read_spec(checkpoint)
    assert linear_format(checkpoint, "auto") == name
    assert linear_format(checkpoint, "none") == "none"
    assert linear_format(checkpoint, "auto", keeps_groups=False) == "none"
    for keeps_groups in (True, False):
        found = cpu_format(checkpoint, "auto", keeps_groups=keeps_groups)
        assert found == CpuFormat("none", keeps_groups)
    assert cpu_format(checkpoint, "none", keeps_groups=True) == CpuFormat("none", False)
    assert num_quantized(checkpoint, spec, "auto") == 0  # with scales of rows
    for is_hopper in (True, False):
        assert gpu_format(checkpoint, "auto", is_hopper) == GpuFormat(keeps_groups=True)
        assert gpu_format(checkpoint, "none", is_hopper) == GpuFormat()


def test_int4_rounds_weights_of_16_bits(tmp_path: Path) -> None:
    checkpoint = written(tmp_path, "none")
    assert linear_format(checkpoint, "int4") == "int4"
    assert linear_format(checkpoint, "int4", keeps_groups=False) == "none"
    for keeps_groups in (True, False):
        found = cpu_format(checkpoint, "int4", keeps_groups=keeps_groups)
        assert found == CpuFormat("int4", keeps_groups)
    assert rounds_weights(checkpoint, "int4") and not rounds_weights(checkpoint, "fp8")
    assert num_quantized(checkpoint, read_spec(checkpoint), "int4") == 0
    for is_hopper in (True, False):
        assert gpu_format(checkpoint, "int4", is_hopper) == GpuFormat(keeps_groups=True)
        assert gpu_format(checkpoint, "auto", is_hopper) == GpuFormat()


@pytest.mark.parametrize(("config", "name"), [(AWQ, "int4"), (MXFP4, "mxfp4")])
def test_int4_leaves_folders_of_4_bits_as_they_are(
    tmp_path: Path, config: dict[str, Any], name: str
) -> None:
    checkpoint = in_groups(tmp_path, config)
    assert linear_format(checkpoint, "int4") == name
    assert not rounds_weights(checkpoint, "int4")
    assert cpu_format(checkpoint, "int4", keeps_groups=True) == CpuFormat("none")
    for is_hopper in (True, False):
        assert gpu_format(checkpoint, "int4", is_hopper) == GpuFormat(keeps_groups=True)


@pytest.mark.parametrize(
    ("config", "setting", "allowed"),
    [
        (AWQ, "fp8", "auto, none, int4; for fp8"),
        (AWQ, "int8", "auto, none, int4; for int8"),
        (GPTQ_8, "int8", "auto, none; for int8"),
        (GPTQ_8, "int4", "auto, none; for int4"),
    ],
)
def test_other_values_than_those_in_groups_are_refused(
    tmp_path: Path, config: dict[str, Any], setting: Quantization, allowed: str
) -> None:
    checkpoint = in_groups(tmp_path, config)
    with pytest.raises(ConfigError, match=f"allowed for it: {allowed}"):
        linear_format(checkpoint, setting)
    with pytest.raises(ConfigError, match=f"allowed for it: {allowed}"):
        gpu_format(checkpoint, setting, is_hopper=True)


def test_int4_refuses_weights_of_8_bits(tmp_path: Path) -> None:
    checkpoint = written(tmp_path, "fp8")
    message = "allowed for it: auto, none, fp8; for int4"
    with pytest.raises(ConfigError, match=message):
        linear_format(checkpoint, "int4")
    with pytest.raises(ConfigError, match=message):
        gpu_format(checkpoint, "int4", is_hopper=True)


def test_rounding_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = written(tmp_path, "none")
    config = EngineConfig(
        model=str(checkpoint.path), device="echo", quantization="int4", num_blocks=64
    )
    factory.build(config, checkpoint, lambda what, fraction: None)
    assert "int4 rounds weights to 4 bits as they are loaded, which changes outputs" in caplog.text


def test_layers_that_keep_their_bits_do_not_count(tmp_path: Path) -> None:
    checkpoint = tiny.write_llama(tmp_path / "in")
    spec = read_spec(checkpoint)
    names = {name for name in linear_names(spec) if ".mlp." in name}
    quantize_folder(checkpoint.path, tmp_path / "out", names, "fp8")
    found = num_quantized(Checkpoint(tmp_path / "out", "huggingface"), spec, "auto")
    assert found == sum(3 * spec.hidden_size * layer.mlp.width for layer in spec.layers)


def test_weights_that_are_drawn_are_not_quantised_already(tmp_path: Path) -> None:
    checkpoint = dataclasses.replace(written(tmp_path, "int8"), random_weights=True)
    assert linear_format(checkpoint, "auto") == "none"
    assert linear_format(checkpoint, "fp8") == "fp8"


def test_activations_of_16_bits_are_for_gpus(tmp_path: Path) -> None:
    """CPUs dequantise such formats."""
    checkpoint = written(tmp_path, "int8")
    spec = read_spec(checkpoint)
    quantized_models.keep_activations(checkpoint.path)
    assert linear_format(checkpoint, "auto") == "none"
    assert num_quantized(checkpoint, spec, "auto") == 0
    assert linear_format(checkpoint, "int8") == "int8"
    elements = spec.num_layers * spec.matrix_elements_per_layer
    for hopper in (True, False):
        found = gpu_format(checkpoint, "auto", hopper)
        assert found == GpuFormat(frozenset({INT8}), weight_only=True)
        assert num_quantized_on_gpu(checkpoint, spec, "auto", found) == elements
        assert gpu_format(checkpoint, "none", hopper) == GpuFormat()


@pytest.mark.parametrize(
    ("stored", "setting", "on_hopper", "on_others"),
    [
        ("none", "auto", "none", "none"),
        ("none", "fp8", "fp8", "fp8"),
        ("fp8", "auto", "fp8", "fp8"),
        ("fp8", "none", "none", "none"),
        ("int8", "auto", "int8", "int8"),
        ("none", "int8", "int8", "int8"),
        ("none", "int8_hadamard", "int8_hadamard", "int8"),
    ],
)
def test_gpus_differ_in_what_keeps_8_bits(
    tmp_path: Path, stored: str, setting: Quantization, on_hopper: str, on_others: str
) -> None:
    checkpoint = written(tmp_path, stored)
    spec = read_spec(checkpoint)
    elements = spec.num_layers * spec.matrix_elements_per_layer
    for hopper, expected in ((True, on_hopper), (False, on_others)):
        found = gpu_format(checkpoint, setting, hopper)
        assert found.name == expected
        assert found.weight_only == (expected != "none" and not hopper)
        count = num_quantized_on_gpu(checkpoint, spec, setting, found)
        assert count == (0 if expected == "none" else elements)


def test_a_gguf_file_of_32_bits_is_quantised_only_by_the_setting(tmp_path: Path) -> None:
    checkpoint = tiny_gguf.write_gguf(tmp_path / "x.gguf")
    assert linear_format(checkpoint, "auto") == "none"
    assert linear_format(checkpoint, "int8") == "int8"


@pytest.mark.parametrize(
    ("setting", "keeps_groups", "expected"),
    [
        ("auto", True, "Q4_1"),
        ("auto", False, "none"),
        ("none", True, "none"),
        ("fp8", True, "fp8"),
        ("int8", True, "int8"),
    ],
)
def test_a_gguf_file_keeps_its_bits_unless_the_setting_says_otherwise(
    tmp_path: Path, setting: Quantization, keeps_groups: bool, expected: str
) -> None:
    checkpoint = tiny_gguf.write_gguf(tmp_path / "x.gguf", Kind.Q4_1)
    spec = read_spec(checkpoint)
    assert linear_format(checkpoint, setting, keeps_groups=keeps_groups) == expected
    shapes = linear_shapes(spec)
    in_layers = kept_in_layers(checkpoint, spec, shapes, setting, keeps_groups=keeps_groups)
    outside = kept_outside_layers(checkpoint, spec, setting, keeps_groups=keeps_groups)
    if expected == "Q4_1":
        assert in_layers.num_values == spec.quantizable_elements
        assert outside.num_values == 2 * spec.vocab_size * spec.hidden_size
        assert in_layers.bits == outside.bits == 5
    else:
        assert in_layers == outside == KeptValues()
    in_8_bits = spec.quantizable_elements if expected == setting != "none" else 0
    assert num_quantized(checkpoint, spec, setting) == in_8_bits
    on_gpu = gpu_format(checkpoint, setting, is_hopper=True)
    assert on_gpu.keeps_groups == (setting == "auto")
    assert on_gpu.name == (setting if setting in ("fp8", "int8") else "none")


@pytest.mark.parametrize(
    ("kind", "expected", "bits", "outside"),
    [(Kind.Q4_1, "Q4_1", 5, 5), (Kind.Q8_0, "int4", None, 8.5), (Kind.BF16, "int4", None, 0)],
)
def test_int4_rounds_what_has_more_bits_in_a_file(
    tmp_path: Path, kind: Kind, expected: str, bits: float | None, outside: float
) -> None:
    checkpoint = tiny_gguf.write_gguf(tmp_path / "x.gguf", kind)
    spec = read_spec(checkpoint)
    shapes = linear_shapes(spec)
    assert linear_format(checkpoint, "int4") == expected
    assert rounds_weights(checkpoint, "int4") == (expected == "int4")
    found = kept_in_layers(checkpoint, spec, shapes, "int4")
    assert found.types == (expected,)
    assert found.num_values == spec.quantizable_elements
    if bits is None:
        assert found == rounded_layers(shapes.values())
    else:
        assert found.bits == bits
    assert kept_outside_layers(checkpoint, spec, "int4").bits == outside
    for kept in (
        kept_in_layers(checkpoint, spec, shapes, "int4", keeps_groups=False),
        kept_outside_layers(checkpoint, spec, "int4", keeps_groups=False),
    ):
        assert kept == KeptValues()


def test_8_bits_and_groups_are_named_together(tmp_path: Path) -> None:
    folders.write_mixed(tmp_path)
    checkpoint = Checkpoint(tmp_path, "huggingface")
    assert linear_format(checkpoint, "auto") == "fp8 and int4"
    assert linear_format(checkpoint, "auto", keeps_groups=False) == "fp8"
    assert cpu_format(checkpoint, "auto", keeps_groups=False) == CpuFormat("auto", False)
    on_gpu = gpu_format(checkpoint, "auto", is_hopper=True)
    assert on_gpu == GpuFormat(frozenset({FP8}), weight_only=False, keeps_groups=True)
    quantized_models.keep_activations(tmp_path)
    assert linear_format(checkpoint, "auto") == "int4"
    assert cpu_format(checkpoint, "auto", keeps_groups=True) == CpuFormat("none")


def test_weights_that_are_drawn_have_no_types(tmp_path: Path) -> None:
    checkpoint = tiny_gguf.write_gguf(tmp_path / "x.gguf", Kind.Q4_1)
    drawn = dataclasses.replace(checkpoint, random_weights=True)
    assert linear_format(drawn, "auto") == "none"
    spec = read_spec(checkpoint)
    assert kept_in_layers(drawn, spec, linear_shapes(spec), "auto") == KeptValues()
