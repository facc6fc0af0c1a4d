"""The memory of matrices in groups follows from what their tensors are."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import family
import grouped_folders as folders
from inflight.checkpoint.locate import Checkpoint
from inflight.config import Quantization
from inflight.models.linear.grouped_records import joined_records
from inflight.models.loader import linear_shapes
from inflight.models.quantization.choice import kept_in_layers
from inflight.models.quantization.gguf.kinds import KINDS
from inflight.models.quantization.gguf.sizes import form_of
from inflight.models.quantization.grouped_memory import (
    Form,
    KeptValues,
    host_bits,
    record_bits,
)
from inflight.models.registry import read_spec
from inflight.models.spec import ModelSpec
from inflight.models.stored.gguf_blocks import shaped
from inflight_kernels.ops.linear import grouped_rows


@pytest.mark.parametrize(
    ("bits", "group", "has_minimums", "expected"),
    [
        (4, 32, False, 4.5),
        (4, 32, True, 5),
        (4, 128, False, 4.125),
        (4, 16, True, 6),
        (5, 32, True, 9),
        (6, 16, False, 9),
        (8, 32, False, 8.5),
    ],
)
def test_a_weight_takes_its_code_and_a_share_of_its_scale(
    bits: int, group: int, has_minimums: bool, expected: float
) -> None:
    assert host_bits(Form(bits, group, has_minimums, width=4096)) == expected


def test_without_codes_a_weight_has_no_bits() -> None:
    assert KeptValues().bits == 0


def written(
    folder: Path, group: int, bits: int = 4, **changes: Any
) -> tuple[Checkpoint, ModelSpec]:
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

    folders.write(folders.qwen3(**changes), folder, config, encode)
    checkpoint = Checkpoint(folder, "huggingface")
    return checkpoint, read_spec(checkpoint)


def kept(checkpoint: Checkpoint, spec: ModelSpec, setting: Quantization) -> KeptValues:
    return kept_in_layers(checkpoint, spec, linear_shapes(spec), setting)


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
    found = kept(checkpoint, spec, setting)
    assert found.num_values == num_values(spec, "q_proj")
    assert found.bits == per_value
    assert found.num_bytes == found.num_values * per_value / 8


def test_matrices_that_are_dequantised_do_not_count(tmp_path: Path) -> None:
    """Of 64, 96 and 128 columns, those of 96 have a smaller group at the end."""
    checkpoint, spec = written(tmp_path, 64)
    found = kept(checkpoint, spec, "auto")
    assert found.num_values == num_values(spec, "q_proj", "down_proj")
    assert kept(checkpoint, spec, "none") == KeptValues()
    settings: list[Quantization] = ["auto", "int4"]
    for setting in settings:
        shapes = linear_shapes(spec)
        found = kept_in_layers(checkpoint, spec, shapes, setting, keeps_groups=False)
        assert found == KeptValues()


@pytest.mark.parametrize(("group", "leaves_out"), [(16, ["q_proj"]), (20, [""])])
def test_groups_that_kernels_do_not_take_do_not_count(
    tmp_path: Path, group: int, leaves_out: list[str]
) -> None:
    """Of 64, 80 and 128 columns: only those of 80 are groups of 20, no multiple of 8."""
    checkpoint, spec = written(tmp_path, group, intermediate_size=80)
    assert kept(checkpoint, spec, "auto").num_values == num_values(spec, *leaves_out)


def test_the_setting_rounds_all_linear_layers(tmp_path: Path) -> None:
    checkpoint = family.write_folder(folders.qwen3(), tmp_path)
    spec = read_spec(checkpoint)
    found = kept(checkpoint, spec, "int4")
    assert found.num_values == num_values(spec)
    expected = 0.0
    for n, k in linear_shapes(spec).values():
        expected += n * k * {64: 4.5, 96: 5.0, 128: 4.25}[k]
    assert 8 * found.num_bytes == expected
    drawn = dataclasses.replace(checkpoint, random_weights=True)
    assert kept(drawn, spec, "int4") == found
    assert kept(checkpoint, spec, "auto") == KeptValues()


@pytest.mark.parametrize(
    ("bits", "group", "has_minimums", "width", "expected"),
    [
        (4, 128, True, 4096, 4.25),
        (4, 64, False, 4096, 4.5),  # as two groups of 32
        (4, 32, False, 2880, 4.5 * 2944 / 2880),
        (6, 16, False, 256, 7.0),
        (5, 64, True, 256, 7.0),
        (6, 256, False, 256, 6.5),
        (8, 4096, False, 4096, 8.125),
        (4, 200, False, 200, 4.125 * 256 / 200),  # one group, in two records
    ],
)
def test_records_of_gpus_are_padded_and_have_groups_of_three_sizes(
    bits: int, group: int, has_minimums: bool, width: int, expected: float
) -> None:
    form = Form(bits, group, has_minimums, width)
    assert record_bits(form) == pytest.approx(expected)
    codes = torch.zeros(32, width, dtype=torch.uint8)
    scales = torch.ones(32, width // group)
    minimums = torch.zeros(32, width // group) if has_minimums else None
    zero = 0 if has_minimums else 1 << bits - 1
    packed = grouped_rows.pack(codes, bits, scales, minimums, zero)
    assert 8 * packed.nbytes / codes.numel() == pytest.approx(expected)


@pytest.mark.parametrize("name", KINDS)
def test_records_of_the_types_of_gguf_files(name: str) -> None:
    kind = KINDS[name]
    matrix = shaped((32, 2048), kind)
    packed = joined_records([matrix], torch.device("meta"))
    assert packed is not None
    assert packed.kind.units == (kind.units is not None)
    assert 8 * packed.nbytes / (32 * 2048) == record_bits(form_of(kind, 2048))
