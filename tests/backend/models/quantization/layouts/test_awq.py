"""Matrices of AWQ folders are what AutoAWQ's formula makes of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import grouped_folders as folders
import kept_groups
from inflight.checkpoint.locate import Checkpoint
from inflight.errors import ConfigError
from inflight.models.quantization.grouped import GroupedMatrix

CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
MODULE = "model.layers.0.mlp.down_proj."  # [64, 96]
ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def packed(rows: list[list[int]]) -> Tensor:
    """[m, n] as [m, n / 8] int32: place j of a word has column ORDER[j]."""
    moved = [
        [row[first + column] for first in range(0, len(row), 8) for column in ORDER] for row in rows
    ]
    return folders.packed_rows(torch.tensor(moved), 4)


def encoded(module: str, weight: Tensor, group: int = 32) -> dict[str, Tensor]:
    n, k = weight.shape
    return {
        f"{module}qweight": packed(folders.drawn_codes(k, n, 4).tolist()),
        f"{module}qzeros": packed(folders.drawn_codes(k // group, n, 4, seed=1).tolist()),
        f"{module}scales": folders.drawn_scales(k // group, n),
    }


def test_a_word_of_autoawq() -> None:
    """Columns 0 to 7 as AutoAWQ's packing has them, by hand."""
    assert packed([list(range(8))]).tolist() == [[0x75316420]]


@pytest.mark.parametrize("group", [32, -1])
def test_each_value_is_that_of_the_formula(tmp_path: Path, group: int) -> None:
    tensors = folders.write(
        folders.qwen3(),
        tmp_path,
        CONFIG | {"group_size": group},
        lambda module, weight: encoded(module, weight, 32 if group == 32 else weight.shape[1]),
    )
    width = 32 if group == 32 else 96
    codes = folders.drawn_codes(96, 64, 4).tolist()
    zeros = folders.drawn_codes(96 // width, 64, 4, seed=1).tolist()
    scales = tensors[f"{MODULE}scales"].tolist()
    weights = folders.opened(tmp_path)
    found = weights.read(f"{MODULE}weight").tolist()
    for row in range(64):
        for column in range(96):
            at = column // width
            assert found[row][column] == (codes[column][row] - zeros[at][row]) * scales[at][row]
    matrix = weights.read_matrix(f"{MODULE}weight")
    assert isinstance(matrix, GroupedMatrix)
    assert (matrix.bits, matrix.group, matrix.columns) == (4, width, None)


def test_logits_equal_those_of_the_dequantised_weights(tmp_path: Path) -> None:
    """With layers that `modules_to_not_convert` names."""

    def encode(module: str, weight: Tensor) -> dict[str, Tensor]:
        plain = {f"{module}weight": weight.half()}
        return plain if "layers.1.mlp" in module else encoded(module, weight)

    config = CONFIG | {"modules_to_not_convert": ["model.layers.1.mlp"]}
    folders.write(folders.qwen3(), tmp_path, config, encode)
    model = folders.with_weights(folders.qwen3(), tmp_path)
    kept_groups.check(Checkpoint(tmp_path, "huggingface"), model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qzeros": None}, f"the tensor '{MODULE}qzeros' is missing"),
        ({"scales": None}, f"the tensor '{MODULE}scales' is missing"),
        ({"qweight": None}, f"'{MODULE}qzeros' has the type I32, and belongs to no quantised"),
        (
            {"qweight": torch.zeros(96, 64, dtype=torch.uint8)},
            f"'{MODULE}qweight' has the type U8, and belongs to no quantised weight",
        ),
        (
            {"qweight": torch.zeros(96, dtype=torch.int32)},
            f"'{MODULE}qweight' has the shape [96]; expected a matrix",
        ),
        (
            {"qweight": torch.zeros(100, 8, dtype=torch.int32)},
            f"'{MODULE}qweight' has 100 rows; expected a multiple of 32",
        ),
        (
            {"qzeros": torch.zeros(3, 16, dtype=torch.int32)},
            f"'{MODULE}qzeros' has the shape [3, 16]; expected [3, 8]",
        ),
        (
            {"scales": torch.ones(3, 32)},
            f"'{MODULE}scales' has the shape [3, 32]; expected [3, 64]",
        ),
        ({"scales": torch.full((3, 64), torch.inf)}, f"'{MODULE}scales' has values that are not"),
        (
            {"qweight": torch.zeros(128, 8, dtype=torch.int32)}
            | {"qzeros": torch.zeros(4, 8, dtype=torch.int32), "scales": torch.ones(4, 64)},
            f"{MODULE}weight [64, 128], expected [64, 96]",
        ),
    ],
)
def test_a_damaged_folder_is_refused_by_the_name_of_a_tensor(
    tmp_path: Path, changes: dict[str, Tensor | None], message: str
) -> None:
    tensors: dict[str, Any] = dict(folders.write(folders.qwen3(), tmp_path, CONFIG, encoded))
    tensors |= {f"{MODULE}{name}": tensor for name, tensor in changes.items()}
    folders.save({name: one for name, one in tensors.items() if one is not None}, tmp_path)
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        folders.opened(tmp_path).read(f"{MODULE}weight")
    assert str(tmp_path) in str(caught.value)
