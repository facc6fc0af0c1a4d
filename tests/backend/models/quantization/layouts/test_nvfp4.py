"""Matrices in NVFP4 are what compressed-tensors, and ModelOpt's formula, make of them."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import grouped_folders as folders
import kept_groups
import reference_compression
from inflight.checkpoint.locate import Checkpoint
from inflight.errors import ConfigError
from inflight.models.quantization.grouped import GroupedMatrix
from inflight.models.quantization.recognition import MODELOPT_FILE

MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
DOWN = "model.layers.0.mlp.down_proj.weight"  # [64, 96]
MAGNITUDES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def encoded(module: str, weight: Tensor) -> dict[str, Tensor]:
    """ModelOpt's tensors, with random codes."""
    n, k = weight.shape
    codes = folders.drawn_codes(n, k, 4)
    return {
        f"{module}weight": (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8),
        f"{module}weight_scale": (100 * folders.drawn_scales(n, k // 16, torch.float32)).to(
            torch.float8_e4m3fn
        ),
        f"{module}weight_scale_2": torch.tensor(0.013),
        f"{module}input_scale": torch.tensor(0.5),
    }


def in_32_bits(tensors: dict[str, Tensor], name: str) -> Tensor:
    """A weight as the package dequantises it, which does so in bfloat16 by itself."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    packed, scale = tensors[f"{name}_packed"], tensors[f"{name}_scale"].float()
    n, half = packed.shape
    common = tensors[f"{name}_global_scale"]
    values = unpack_fp4_from_uint8(packed, n, 2 * half, dtype=torch.float32)
    found: Tensor = dequantize(
        values, scale, args=QuantizationArgs(**ARGUMENTS), global_scale=common
    )
    return found


ARGUMENTS: dict[str, Any] = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "symmetric": True,
}


def test_logits_equal_those_of_the_weights_that_the_reference_dequantises(tmp_path: Path) -> None:
    model, plain = folders.qwen3(), folders.qwen3()
    expected = reference_compression.write(model, tmp_path, "nvfp4-pack-quantized", **ARGUMENTS)
    weights, stored = folders.opened(tmp_path), load_file(tmp_path / "model.safetensors")
    for name in [name for name in expected if folders.LINEAR.fullmatch(name)]:
        assert not torch.equal(expected[name], plain.state_dict()[name])
        torch.testing.assert_close(weights.read(name), expected[name], rtol=2**-7, atol=0)
        expected[name] = in_32_bits(stored, name)
        assert torch.equal(weights.read(name), expected[name])
        matrix = weights.read_matrix(name)
        assert isinstance(matrix, GroupedMatrix) and (matrix.bits, matrix.group) == (4, 16)
    plain.load_state_dict(expected)
    kept_groups.check(Checkpoint(tmp_path, "huggingface"), plain)


def test_each_value_of_modelopts_files_is_that_of_the_formula(tmp_path: Path) -> None:
    tensors = folders.write(folders.qwen3(), tmp_path, MODELOPT, encoded)
    codes, common = folders.drawn_codes(64, 96, 4), tensors[f"{DOWN}_scale_2"]
    scales = tensors[f"{DOWN}_scale"].float()
    found = folders.opened(tmp_path).read(DOWN)
    for row in range(64):
        for column in range(96):
            code = int(codes[row, column])
            value = math.copysign(MAGNITUDES[code & 7], -1 if code & 8 else 1)
            assert found[row, column] == scales[row, column // 16] * common * value
    model = folders.with_weights(folders.qwen3(), tmp_path)
    kept_groups.check(Checkpoint(tmp_path, "huggingface"), model)


def test_modelopts_own_file_names_the_format(tmp_path: Path) -> None:
    folders.write(folders.qwen3(), tmp_path, {}, encoded)
    config = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    (tmp_path / MODELOPT_FILE).write_text(json.dumps({"quantization": config}))
    assert isinstance(folders.opened(tmp_path).read_matrix(DOWN), GroupedMatrix)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_scale": None}, f"the tensor '{DOWN}_scale' is missing"),
        ({"_scale_2": None}, f"the tensor '{DOWN}_scale_2' is missing"),
        ({"": None}, f"'{DOWN}_scale' has the type F8_E4M3, and belongs to no quantised weight"),
        (
            {"": torch.zeros(64, 44, dtype=torch.uint8)},
            f"'{DOWN}' has the shape [64, 44]; expected [n, k / 2], k % 16 = 0",
        ),
        (
            {"_scale": torch.ones(64, 3).to(torch.float8_e4m3fn)},
            f"'{DOWN}_scale' has the shape [64, 3]; expected [64, 6]",
        ),
        ({"_scale": torch.ones(64, 6)}, f"'{DOWN}_scale' has the type F32; expected F8_E4M3"),
        (
            {"_scale": torch.full((64, 6), torch.nan).to(torch.float8_e4m3fn)},
            f"'{DOWN}_scale' has values that are not finite",
        ),
        ({"_scale_2": torch.ones(2)}, f"'{DOWN}_scale_2' has the shape [2]; expected [] or [1]"),
        ({"_scale_2": torch.tensor(torch.inf)}, f"'{DOWN}_scale_2' has values that are not"),
        ({"_scale_2": torch.tensor(3e38)}, f"'{DOWN}_scale' has values that are not finite"),
    ],
)
def test_a_damaged_folder_is_refused_by_the_name_of_a_tensor(
    tmp_path: Path, changes: dict[str, Tensor | None], message: str
) -> None:
    tensors: dict[str, Any] = dict(folders.write(folders.qwen3(), tmp_path, MODELOPT, encoded))
    tensors |= {f"{DOWN}{suffix}": tensor for suffix, tensor in changes.items()}
    folders.save({name: one for name, one in tensors.items() if one is not None}, tmp_path)
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        folders.opened(tmp_path).read(DOWN)
    assert str(tmp_path) in str(caught.value)


def test_a_divisor_of_0_is_refused(tmp_path: Path) -> None:
    def encode(module: str, weight: Tensor) -> dict[str, Tensor]:
        found = encoded(module, weight)
        return {
            f"{module}weight_packed": found[f"{module}weight"],
            f"{module}weight_scale": found[f"{module}weight_scale"],
            f"{module}weight_global_scale": torch.zeros(1),
        }

    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    config = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    folders.write(folders.qwen3(), tmp_path, config, encode)
    with pytest.raises(ConfigError, match=f"'{DOWN}_global_scale' is 0; expected a number to"):
        folders.opened(tmp_path).read(DOWN)
