"""Formats of 8 bits, and of codes with scales of groups, are recognised; others are refused with
their name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inflight.checkpoint.checked_fields import CheckedFields
from inflight.errors import ConfigError
from inflight.models.quantization.recognition import (
    FP8,
    INT8,
    MODELOPT_FILE,
    StoredFormat,
    read_format,
)

BLOCK_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
LLM_INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True}


def refusal(folder: Path, **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read_format(CheckedFields({"model_type": "llama"} | settings, "config.json"), folder)
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ (bits 4, version gemv)"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "GPTQ (bits 3, group_size 128)"),
        (LLM_INT8, "bitsandbytes (load_in_8bit True)"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "FP8"),
        (BLOCK_FP8 | {"weight_block_size": [128]}, "FP8 (weight_block_size [128])"),
        (BLOCK_FP8 | {"weight_block_size": [128, 0]}, "FP8 (weight_block_size [128, 0])"),
        (
            {"quant_method": "compressed-tensors", "format": "marlin-24"},
            "compressed-tensors (format marlin-24)",
        ),
        ({"quant_method": "quark"}, "Quark"),
        (
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
            "ModelOpt (quant_algo MIXED_PRECISION)",
        ),
        ({"quant_method": "unheard_of"}, "'unheard_of'"),
    ],
)
def test_the_format_is_named(tmp_path: Path, config: dict[str, Any], name: str) -> None:
    found = refusal(tmp_path, quantization_config=config)
    assert found.startswith(
        f"config.json: quantization_config: llama with weights in the format {name}"
    )
    assert "or a GGUF file of it" in found


def test_mlx_and_modelopts_own_file_are_named(tmp_path: Path) -> None:
    assert "quantization: llama with weights in the format MLX (bits 4)" in refusal(
        tmp_path, quantization={"bits": 4}, quantization_config={"bits": 4}
    )
    path = tmp_path / MODELOPT_FILE
    path.write_text(json.dumps({"quantization": {"quant_algo": "W4A8_AWQ"}}))
    found = refusal(tmp_path)
    assert "ModelOpt (quant_algo W4A8_AWQ)" in found and str(path) in found


def test_unquantised_folders_pass(tmp_path: Path) -> None:
    fields = {"model_type": "llama", "quantization_config": None, "quantization": {}}
    read_format(CheckedFields(fields, "config.json"), tmp_path)


# ---------------------------------------------------------------- supported formats


def compressed(*weights: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """A config of compressed-tensors with a group for each of these weights."""
    plain = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    groups = {}
    for index, one in enumerate(weights or ({},)):
        found = plain | one
        activations = {"num_bits": 8, "type": found["type"], "strategy": "token", "dynamic": True}
        groups[f"group_{index}"] = {
            "targets": ["Linear"],
            "weights": found,
            "input_activations": activations,
        }
    found = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    return found | {"config_groups": groups} | settings


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (BLOCK_FP8, StoredFormat("FP8, blocks of 128x128", frozenset({FP8}), (128, 128))),
        (
            {"quant_method": "fp8", "activation_scheme": "static"},
            StoredFormat("FP8", frozenset({FP8})),
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8"},
            StoredFormat("FP8 (ModelOpt)", frozenset({FP8})),
        ),
        (
            {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
            StoredFormat("FP8 (FBGEMM)", frozenset({FP8})),
        ),
        (compressed(), StoredFormat("FP8 (compressed-tensors)", frozenset({FP8}))),
        (
            compressed({"type": "int"}, format="int-quantized"),
            StoredFormat("INT8 (compressed-tensors)", frozenset({INT8})),
        ),
        (
            compressed({"type": "int"}, {"strategy": "tensor"}, format="naive-quantized"),
            StoredFormat("FP8 and INT8 (compressed-tensors)", frozenset({FP8, INT8})),
        ),
        (
            compressed({"strategy": "block", "block_structure": "64x32"}),
            StoredFormat("FP8 (compressed-tensors)", frozenset({FP8}), (64, 32)),
        ),
    ],
)
def test_formats_of_8_bits_are_recognised(
    tmp_path: Path, config: dict[str, Any], expected: StoredFormat
) -> None:
    fields = CheckedFields({"model_type": "llama", "quantization_config": config}, "config.json")
    assert read_format(fields, tmp_path) == expected


@pytest.mark.parametrize(
    "activations",
    [None, {"num_bits": 4, "type": "float"}, {"num_bits": 8, "type": "int"}],
    ids=["16 bits", "4 bits", "another type"],
)
def test_activations_of_other_types_are_not_quantised(
    tmp_path: Path, activations: dict[str, Any] | None
) -> None:
    """If that holds for one of the groups, it does for all."""
    config = compressed({}, {"strategy": "tensor"})
    config["config_groups"]["group_1"]["input_activations"] = activations
    fields = CheckedFields({"model_type": "llama", "quantization_config": config}, "config.json")
    found = read_format(fields, tmp_path)
    assert found is not None and found.weight_only and not found.is_executable


def test_modelopts_own_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / MODELOPT_FILE
    path.write_text(json.dumps({"quantization": {"quant_algo": "FP8", "exclude_modules": []}}))
    found = read_format(CheckedFields({"model_type": "llama"}, "config.json"), tmp_path)
    assert found == StoredFormat("FP8 (ModelOpt)", frozenset({FP8}))


@pytest.mark.parametrize(
    "config",
    [
        compressed({"strategy": "group", "group_size": 128}),
        compressed({"num_bits": 4}),
        compressed({"symmetric": False}),
        compressed({"dynamic": True}),
        compressed({"type": "int"}),
        compressed({"type": "complex"}),
        compressed({"strategy": "block", "block_structure": "128"}),
        compressed({"strategy": "block", "block_structure": "128x128"}, {}),
        compressed(config_groups={}),
        compressed(config_groups={"group_0": {"targets": ["Linear"], "weights": None}}),
        compressed(config_groups=["Linear"]),
        compressed(sparsity_config={"format": "sparse-24-bitmask"}),
        compressed(sparsity_config="dense"),
        compressed(transform_config={"config_groups": {}}),
        compressed(quantization_status="frozen"),
    ],
)
def test_other_kinds_of_compressed_tensors_are_refused(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    found = refusal(tmp_path, quantization_config=config)
    assert "llama with weights in the format compressed-tensors (format float-quantized)" in found
    assert "FP8 (e4m3) and INT8 with one scale for each tensor, row or block" in found
