"""The memory of matrices in groups follows from what their tensors are."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

import family
import grouped_folders as folders
from inflight.checkpoint.locate import Checkpoint
from inflight.config import Quantization
from inflight.models.loader import linear_shapes
from inflight.models.quantization.grouped_memory import (
    GroupedSize,
    code_bits,
    grouped_bits,
    grouped_size,
)
from inflight.models.registry import read_spec
from inflight.models.spec import ModelSpec


def test_a_weight_has_a_code_and_its_part_of_scale_and_minimum() -> None:
    assert grouped_bits(4, 128, has_minimums=False) == 4.125
    assert grouped_bits(4, 32, has_minimums=True) == 5
    assert [code_bits(bits) for bits in (4, 5, 6, 8)] == [4, 8, 8, 8]
    assert GroupedSize().bits_per_value == 0


def written(folder: Path, group: int, bits: int = 4) -> tuple[Checkpoint, ModelSpec]:
    """GPTQ, symmetric, with q in 16 bits."""
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": True}

    def encode(module: str, weight: Tensor) -> dict[str, Tensor]:
        n, k = weight.shape
        count = -(-k // group)
        if "q_proj" in module:
            return {f"{module}weight": weight}
        return {
            f"{module}qweight": torch.zeros(k * bits // 32, n, dtype=torch.int32),
            f"{module}qzeros": torch.full((count, n * bits // 32), 0x77777777, dtype=torch.int32),
            f"{module}scales": torch.ones(count, n),
        }

    folders.write(folders.qwen3(), folder, config, encode)
    checkpoint = Checkpoint(folder, "huggingface")
    return checkpoint, read_spec(checkpoint)


def num_values(spec: ModelSpec, *leaves_out: str) -> int:
    shapes = linear_shapes(spec)
    names = [name for name in shapes if not any(one in name for one in leaves_out)]
    return sum(shapes[name][0] * shapes[name][1] for name in names)


@pytest.mark.parametrize(("bits", "per_value"), [(4, 4.5), (8, 8.5)])
@pytest.mark.parametrize("setting", ["auto", "int4"])
def test_a_folder_has_what_its_tensors_have(
    tmp_path: Path, bits: int, per_value: float, setting: Quantization
) -> None:
    checkpoint, spec = written(tmp_path, 32, bits)
    found = grouped_size(checkpoint, linear_shapes(spec), setting)
    assert found.num_values == num_values(spec, "q_proj")
    assert found.bits_per_value == per_value
    assert found.num_bytes == found.num_values * per_value / 8


def test_matrices_that_are_dequantised_do_not_count(tmp_path: Path) -> None:
    """Of 64, 96 and 128 columns, those of 96 have a smaller group at the end."""
    checkpoint, spec = written(tmp_path, 64)
    found = grouped_size(checkpoint, linear_shapes(spec), "auto")
    assert found.num_values == num_values(spec, "q_proj", "down_proj")
    assert grouped_size(checkpoint, linear_shapes(spec), "none") == GroupedSize()


def test_the_setting_rounds_all_linear_layers(tmp_path: Path) -> None:
    checkpoint = family.write_folder(folders.qwen3(), tmp_path)
    spec = read_spec(checkpoint)
    found = grouped_size(checkpoint, linear_shapes(spec), "int4")
    assert found.num_values == num_values(spec)
    expected = 0.0
    for n, k in linear_shapes(spec).values():
        expected += n * k * {64: 4.5, 96: 5.0, 128: 4.25}[k]
    assert found.num_bits == expected
    drawn = dataclasses.replace(checkpoint, random_weights=True)
    assert grouped_size(drawn, linear_shapes(spec), "int4") == found
    assert grouped_size(checkpoint, linear_shapes(spec), "auto") == GroupedSize()
