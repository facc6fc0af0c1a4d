"""Quantised folders are refused with the name of their format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inflight.checkpoint.checked_fields import CheckedFields
from inflight.errors import ConfigError
from inflight.models.refusals.quantization import MODELOPT_FILE, refuse_quantized

BLOCK_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def refusal(folder: Path, **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        refuse_quantized(CheckedFields({"model_type": "llama"} | settings, "config.json"), folder)
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"quant_method": "awq", "bits": 4}, "AWQ (bits 4)"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "GPTQ (bits 4, group_size 128)"),
        (NF4, "bitsandbytes (load_in_4bit True, bnb_4bit_quant_type nf4)"),
        (BLOCK_FP8, "FP8 (weight_block_size [128, 128])"),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
            "compressed-tensors (format pack-quantized)",
        ),
        ({"quant_method": "mxfp4"}, "MXFP4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "ModelOpt (quant_algo FP8)"),
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
    path.write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    found = refusal(tmp_path)
    assert "ModelOpt (quant_algo NVFP4)" in found and str(path) in found


def test_unquantised_folders_pass(tmp_path: Path) -> None:
    fields = {"model_type": "llama", "quantization_config": None, "quantization": {}}
    refuse_quantized(CheckedFields(fields, "config.json"), tmp_path)
