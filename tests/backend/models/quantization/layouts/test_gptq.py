"""Matrices of GPTQ folders are what AutoGPTQ's formula makes of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import Qwen2Config

import family
import grouped_folders as folders
import kept_groups
from inflight.checkpoint.locate import Checkpoint
from inflight.errors import ConfigError
from inflight.models.quantization.grouped import GroupedMatrix
from inflight.models.quantization.layouts.gptq import _zeros
from inflight.models.quantization.layouts.layout import Layout

CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
MODULE = "model.layers.0.mlp.down_proj."  # [64, 96]
WEIGHT = f"{MODULE}weight"


def encoded(
    module: str,
    weight: Tensor,
    bits: int = 4,
    group: int = 32,
    zeros: Tensor | None = None,
    order: Tensor | None = None,
) -> dict[str, Tensor]:
    """Random codes; zeros [k / group, n] as they are stored, by default those of a symmetric file.

    order: the group of each column.
    """
    n, k = weight.shape
    count = -(-k // group)
    if zeros is None:
        zeros = torch.full((count, n), (1 << (bits - 1)) - 1)
    return {
        f"{module}qweight": folders.packed_rows(folders.drawn_codes(n, k, bits), bits).T,
        f"{module}qzeros": folders.packed_rows(zeros, bits),
        f"{module}scales": folders.drawn_scales(count, n),
        f"{module}g_idx": (torch.arange(k) // group if order is None else order).int(),
    }


def check_values(folder: Path, tensors: dict[str, Tensor], bits: int, zeros: Tensor) -> Any:
    """Each value of WEIGHT is that of the formula, with these zeros [groups, n]."""
    codes, scales = folders.drawn_codes(64, 96, bits).tolist(), tensors[f"{MODULE}scales"].tolist()
    groups = tensors[f"{MODULE}g_idx"].tolist()
    weights = folders.opened(folder)
    found = weights.read(WEIGHT).tolist()
    for row in range(64):
        for column, group in enumerate(groups):
            value = (codes[row][column] - int(zeros[group, row])) * scales[group][row]
            assert found[row][column] == value
    return weights.read_matrix(WEIGHT)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("more", [-1, 0], ids=["zeros less 1", "zeros"])
@pytest.mark.parametrize("named", ["gptq", "gptq_v2"])
def test_values_say_how_zeros_of_a_symmetric_file_are_stored(
    tmp_path: Path, bits: int, more: int, named: str
) -> None:
    middle = 1 << (bits - 1)
    tensors = folders.write(
        folders.qwen3(),
        tmp_path,
        CONFIG | {"bits": bits, "checkpoint_format": named},
        lambda module, weight: encoded(
            module,
            weight,
            bits,
            zeros=torch.full((weight.shape[1] // 32, weight.shape[0]), middle + more),
        ),
    )
    matrix = check_values(tmp_path, tensors, bits, torch.full((3, 64), middle))
    assert isinstance(matrix, GroupedMatrix)
    assert (matrix.bits, matrix.group, matrix.columns) == (bits, 32, None)
    assert (matrix.minimums, matrix.zero) == (None, middle)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("named", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("is_symmetric", [False, True], ids=["asymmetric", "wrongly symmetric"])
def test_other_zeros_are_stored_as_the_version_says(
    tmp_path: Path, bits: int, named: str, is_symmetric: bool
) -> None:
    def zeros(n: int, k: int) -> Tensor:
        return folders.drawn_codes(k // 32, n, bits, seed=1).clamp(min=1)

    less = 1 if named == "gptq" else 0
    tensors = folders.write(
        folders.qwen3(),
        tmp_path,
        CONFIG | {"bits": bits, "checkpoint_format": named, "sym": is_symmetric},
        lambda module, weight: encoded(module, weight, bits, zeros=zeros(*weight.shape) - less),
    )
    matrix = check_values(tmp_path, tensors, bits, zeros(64, 96))
    assert isinstance(matrix, GroupedMatrix) and matrix.minimums is not None


@given(st.lists(st.integers(0, 15), min_size=16, max_size=16))
def test_zeros_of_0_return_as_writers_subtracted_from_whole_words(zeros: list[int]) -> None:
    layout = Layout("gptq", "int4", frozenset({4}), frozenset({32}), False, stored_less=1)
    packed = folders.packed_rows(torch.tensor([zeros]), 4)
    stored = [(word - 0x11111111) & 0xFFFFFFFF for word in packed[0].tolist()]
    signed = torch.tensor([[word - (1 << 32) if word >> 31 else word for word in stored]])
    found = _zeros(signed.int(), 16, 4, layout)
    assert found is not None and found.tolist() == [zeros]


def test_columns_are_sorted_by_their_groups(tmp_path: Path) -> None:
    """desc_act: codes are in the checkpoint's order, and g_idx has the group of each."""
    random = torch.Generator().manual_seed(0)

    def encode(module: str, weight: Tensor) -> dict[str, Tensor]:
        k = weight.shape[1]
        order = (torch.arange(k) // 32)[torch.randperm(k, generator=random)]
        return encoded(module, weight, order=order)

    tensors = folders.write(folders.qwen3(), tmp_path, CONFIG | {"desc_act": True}, encode)
    matrix = check_values(tmp_path, tensors, 4, torch.full((3, 64), 8))
    assert isinstance(matrix, GroupedMatrix) and matrix.columns is not None
    groups = tensors[f"{MODULE}g_idx"]
    assert torch.equal(groups[matrix.columns], groups.sort().values)
    model = folders.with_weights(folders.qwen3(), tmp_path)
    kept_groups.check(Checkpoint(tmp_path, "huggingface"), model)


def test_a_smaller_group_at_the_end_is_dequantised(tmp_path: Path) -> None:
    tensors = folders.write(
        folders.qwen3(),
        tmp_path,
        CONFIG | {"group_size": 64},
        lambda module, weight: encoded(module, weight, group=64),
    )
    found = check_values(tmp_path, tensors, 4, torch.full((2, 64), 8))
    assert isinstance(found, Tensor)
    kept = {name: one for name, one in tensors.items() if not name.endswith("g_idx")}
    folders.save(kept, tmp_path)
    assert torch.equal(folders.opened(tmp_path).read(WEIGHT), found)


def test_without_an_order_columns_need_no_g_idx(tmp_path: Path) -> None:
    tensors = folders.write(folders.qwen3(), tmp_path, CONFIG, encoded)
    before = folders.opened(tmp_path).read(WEIGHT)
    kept = {name: one for name, one in tensors.items() if not name.endswith("g_idx")}
    folders.save(kept, tmp_path)
    matrix = folders.opened(tmp_path).read_matrix(WEIGHT)
    assert isinstance(matrix, GroupedMatrix) and torch.equal(matrix.dequantized(), before)


def test_bits_and_groups_of_modules_may_differ(tmp_path: Path) -> None:
    """As `dynamic` says, whose patterns need not be understood."""
    dynamic = {"+:.*down_proj": {"bits": 8, "group_size": 96}, "-:.*q_proj": {}}

    def encode(module: str, weight: Tensor) -> dict[str, Tensor]:
        if "q_proj" in module:
            return {f"{module}weight": weight}
        is_down = "down_proj" in module
        return encoded(module, weight, 8, 96) if is_down else encoded(module, weight)

    tensors = folders.write(folders.qwen3(), tmp_path, CONFIG | {"dynamic": dynamic}, encode)
    matrix = check_values(tmp_path, tensors, 8, torch.full((1, 64), 128))
    assert isinstance(matrix, GroupedMatrix) and (matrix.bits, matrix.group) == (8, 96)
    model = folders.with_weights(folders.qwen3(), tmp_path)
    kept_groups.check(Checkpoint(tmp_path, "huggingface"), model)


def test_biases_of_zeros_that_the_model_has_not_are_left_out(tmp_path: Path) -> None:
    """As in Qwen's own files; its q, k and v have biases."""
    settings = family.SHAPE | {"num_hidden_layers": 2, "pad_token_id": 0}
    model = family.make(Qwen2Config(**settings))

    def encode(module: str, weight: Tensor) -> dict[str, Tensor]:
        found = encoded(module, weight)
        if module.split(".")[-2] not in ("q_proj", "k_proj", "v_proj"):
            found[f"{module}bias"] = torch.zeros(len(weight), dtype=torch.float16)
        return found

    tensors = folders.write(model, tmp_path, CONFIG, encode)
    with_ours = folders.with_weights(model, tmp_path)
    kept_groups.check(Checkpoint(tmp_path, "huggingface"), with_ours)
    tensors[f"{MODULE}bias"][3] = 1.0
    folders.save(tensors, tmp_path)
    with pytest.raises(ConfigError, match=f"unexpected tensors .*{MODULE}bias"):
        folders.opened(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qzeros": None}, f"the tensor '{MODULE}qzeros' is missing"),
        ({"scales": None}, f"the tensor '{MODULE}scales' is missing"),
        ({"g_idx": None}, f"the tensor '{MODULE}g_idx' is missing"),
        ({"qweight": None}, f"'{MODULE}g_idx' has the type I32, and belongs to no quantised"),
        (
            {"qweight": torch.zeros(0, 64, dtype=torch.int32)},
            f"'{MODULE}qweight' has the shape [0, 64]; expected a matrix",
        ),
        (
            {"g_idx": torch.zeros(90, dtype=torch.int32)},
            f"'{MODULE}g_idx' has the shape [90]; expected [96]",
        ),
        (
            {"g_idx": torch.full((96,), 3)},
            f"'{MODULE}g_idx' names groups from 3 to 3; expected 0 to 2",
        ),
        ({"g_idx": torch.full((96,), -1)}, "names groups from -1 to -1; expected 0 to 2"),
        ({"g_idx": torch.zeros(96)}, f"'{MODULE}g_idx' has the type F32; expected I32 or I64"),
        (
            {"qzeros": torch.zeros(3, 16, dtype=torch.int32)},
            f"'{MODULE}qzeros' has the shape [3, 16]; expected [3, 8]",
        ),
        (
            {"scales": torch.ones(4, 64)},
            f"'{MODULE}scales' has the shape [4, 64]; expected [3, 64]",
        ),
        ({"scales": torch.full((3, 64), torch.nan)}, f"'{MODULE}scales' has values that are not"),
    ],
)
def test_a_damaged_folder_is_refused_by_the_name_of_a_tensor(
    tmp_path: Path, changes: dict[str, Tensor | None], message: str
) -> None:
    config = CONFIG | {"desc_act": True}
    tensors: dict[str, Any] = dict(folders.write(folders.qwen3(), tmp_path, config, encoded))
    tensors |= {f"{MODULE}{name}": tensor for name, tensor in changes.items()}
    folders.save({name: one for name, one in tensors.items() if one is not None}, tmp_path)
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        folders.opened(tmp_path).read(WEIGHT)
    assert str(tmp_path) in str(caught.value)
