"""Matrices of pack-quantized folders are what compressed-tensors makes of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import Phi3Config

import family
import grouped_folders as folders
import kept_groups
import reference_compression
from inflight.checkpoint.locate import Checkpoint
from inflight.errors import ConfigError
from inflight.models.quantization.grouped import GroupedMatrix
from inflight.models.quantization.layouts.codes import unpacked

DOWN = "model.layers.0.mlp.down_proj.weight"  # [64, 96]


def config(**weights: Any) -> dict[str, Any]:
    plain = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": plain | weights,
                "input_activations": None,
            }
        },
        "ignore": ["lm_head"],
    }


def encoded(
    module: str, weight: Tensor, bits: int = 4, group: int = 32, zeros: bool = False
) -> dict[str, Tensor]:
    """Random codes in the place of a weight."""
    n, k = weight.shape
    found = {
        f"{module}weight_packed": folders.packed_rows(folders.drawn_codes(n, k, bits), bits),
        f"{module}weight_scale": folders.drawn_scales(n, k // group, torch.bfloat16),
        f"{module}weight_shape": torch.tensor([n, k]),
    }
    if zeros:
        drawn = folders.drawn_codes(k // group, n, bits, seed=1)
        found[f"{module}weight_zero_point"] = folders.packed_rows(drawn, bits).T
    return found


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("is_symmetric", [True, False], ids=["symmetric", "asymmetric"])
def test_each_value_is_that_of_the_formula(tmp_path: Path, bits: int, is_symmetric: bool) -> None:
    tensors = folders.write(
        folders.qwen3(),
        tmp_path,
        config(num_bits=bits, symmetric=is_symmetric),
        lambda module, weight: encoded(module, weight, bits, zeros=not is_symmetric),
    )
    codes = folders.drawn_codes(64, 96, bits).tolist()
    zeros = folders.drawn_codes(3, 64, bits, seed=1).tolist()
    scales = tensors[f"{DOWN}_scale"].tolist()
    weights = folders.opened(tmp_path)
    found = weights.read(DOWN).tolist()
    for row in range(64):
        for column in range(96):
            zero = 1 << (bits - 1) if is_symmetric else zeros[column // 32][row]
            value = (codes[row][column] - zero) * scales[row][column // 32]
            assert found[row][column] == value
    matrix = weights.read_matrix(DOWN)
    assert isinstance(matrix, GroupedMatrix)
    assert (matrix.bits, matrix.group, matrix.columns) == (bits, 32, None)
    assert (matrix.minimums is None) == is_symmetric


def test_a_word_has_the_first_code_in_its_lowest_bits() -> None:
    word = torch.tensor([[0x76543210], [-0x01234568]], dtype=torch.int32)  # FEDCBA98
    assert unpacked(word, 4).tolist() == [list(range(8)), list(range(8, 16))]
    assert unpacked(word, 8).tolist() == [[0x10, 0x32, 0x54, 0x76], [0x98, 0xBA, 0xDC, 0xFE]]


def test_a_transposed_row_is_unpacked() -> None:
    """It is contiguous, though its strides are not those of a column."""
    row = torch.tensor([[1, 2, 3]], dtype=torch.int32)
    assert unpacked(row.T, 8)[:, 0].tolist() == [1, 2, 3]


@settings(deadline=None)
@given(
    bits=st.sampled_from([4, 8]),
    rows=st.lists(st.lists(st.integers(0, 15), min_size=16, max_size=16), min_size=1, max_size=4),
)
def test_codes_return_as_they_were_packed(bits: int, rows: list[list[int]]) -> None:
    codes = torch.tensor(rows)
    assert torch.equal(unpacked(folders.packed_rows(codes, bits), bits), codes.to(torch.uint8))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("is_symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("strategy", ["group", "channel"])
def test_logits_equal_those_of_the_weights_that_the_reference_dequantises(
    tmp_path: Path, bits: int, is_symmetric: bool, strategy: str
) -> None:
    model, plain = folders.qwen3(), folders.qwen3()
    before = plain.state_dict()
    more = {"group_size": 32} if strategy == "group" else {}
    expected = reference_compression.write(
        model,
        tmp_path,
        "pack-quantized",
        num_bits=bits,
        symmetric=is_symmetric,
        strategy=strategy,
        **more,
    )
    changed = {name for name in expected if not torch.equal(expected[name], before[name])}
    assert changed == {name for name in expected if folders.LINEAR.fullmatch(name)}
    weights = folders.opened(tmp_path)
    for name in changed:
        torch.testing.assert_close(weights.read(name), expected[name], rtol=1e-6, atol=1e-7)
        matrix = weights.read_matrix(name)
        assert isinstance(matrix, GroupedMatrix)
        assert matrix.group == (32 if strategy == "group" else matrix.shape[1])
    plain.load_state_dict(expected)
    kept_groups.check(Checkpoint(tmp_path, "huggingface"), plain)


def test_fused_layers_and_tied_embeddings(tmp_path: Path) -> None:
    changes = {"head_dim": 16, "tie_word_embeddings": True}
    made = Phi3Config(**family.SHAPE | changes, pad_token_id=0)
    model, plain = family.make(made), family.make(made)
    arguments = {"num_bits": 4, "strategy": "group", "group_size": 32}
    expected = reference_compression.write(model, tmp_path, "pack-quantized", **arguments)
    plain.load_state_dict(expected)
    kept_groups.check(Checkpoint(tmp_path, "huggingface"), plain)


def test_columns_are_in_the_order_of_their_groups(tmp_path: Path) -> None:
    """`actorder: group`: codes stay in place, and weight_g_idx has the group of each."""
    random = torch.Generator().manual_seed(0)

    def encode(module: str, weight: Tensor) -> dict[str, Tensor]:
        k = weight.shape[1]
        groups = (torch.arange(k) // 32)[torch.randperm(k, generator=random)]
        return encoded(module, weight, zeros=True) | {
            f"{module}weight_g_idx": groups.to(torch.int32)
        }

    made = config(actorder="group", symmetric=False)
    tensors = folders.write(folders.qwen3(), tmp_path, made, encode)
    groups = tensors[f"{DOWN}_g_idx"].tolist()
    codes = folders.drawn_codes(64, 96, 4).tolist()
    zeros = folders.drawn_codes(3, 64, 4, seed=1).tolist()
    scales = tensors[f"{DOWN}_scale"].tolist()
    weights = folders.opened(tmp_path)
    found = weights.read(DOWN).tolist()
    for row in range(64):
        for column, group in enumerate(groups):
            value = (codes[row][column] - zeros[group][row]) * scales[row][group]
            assert found[row][column] == value
    matrix = weights.read_matrix(DOWN)
    assert isinstance(matrix, GroupedMatrix) and matrix.columns is not None
    assert [groups[column] for column in matrix.columns] == sorted(groups)
    model = folders.with_weights(folders.qwen3(), tmp_path)
    kept_groups.check(Checkpoint(tmp_path, "huggingface"), model)


@pytest.mark.parametrize(
    "groups", [torch.arange(96) // 32, torch.full((96,), -1)], ids=["in order", "as initialised"]
)
def test_an_order_that_changes_nothing_is_left_out(tmp_path: Path, groups: Tensor) -> None:
    tensors = folders.write(folders.qwen3(), tmp_path, config(), encoded)
    before = folders.opened(tmp_path).read(DOWN)
    folders.save(tensors | {f"{DOWN}_g_idx": groups}, tmp_path)
    matrix = folders.opened(tmp_path).read_matrix(DOWN)
    assert isinstance(matrix, GroupedMatrix) and matrix.columns is None
    assert torch.equal(matrix.dequantized(), before)


def test_groups_that_are_not_equally_large_are_dequantised(tmp_path: Path) -> None:
    tensors = folders.write(folders.qwen3(), tmp_path, config(), encoded)
    groups = torch.tensor([0] * 40 + [1] * 40 + [2] * 16)
    folders.save(tensors | {f"{DOWN}_g_idx": groups}, tmp_path)
    found = folders.opened(tmp_path).read_matrix(DOWN)
    assert isinstance(found, Tensor)
    codes, scales = folders.drawn_codes(64, 96, 4), tensors[f"{DOWN}_scale"].float()
    for column in (0, 39, 40, 80, 95):
        expected = (codes[:, column] - 8) * scales[:, groups[column]]
        assert torch.equal(found[:, column], expected)


def test_formats_of_parts_may_differ(tmp_path: Path) -> None:
    """Two groups of the config, and layers that it ignores."""

    def encode(module: str, weight: Tensor) -> dict[str, Tensor]:
        if "v_proj" in module:
            return {f"{module}weight": weight.bfloat16()}
        if "q_proj" in module:
            return encoded(module, weight, bits=8, group=64)
        return encoded(module, weight)

    made = config()
    first = made["config_groups"]["group_0"]
    second = {"weights": first["weights"] | {"num_bits": 8, "group_size": 64}}
    made["config_groups"]["group_1"] = first | second
    folders.write(folders.qwen3(), tmp_path, made, encode)
    weights = folders.opened(tmp_path)
    q, k, v = (weights.read_matrix(f"model.layers.0.self_attn.{x}_proj.weight") for x in "qkv")
    assert isinstance(q, GroupedMatrix) and (q.bits, q.group) == (8, 64)
    assert isinstance(k, GroupedMatrix) and (k.bits, k.group) == (4, 32)
    assert isinstance(v, Tensor) and v.dtype == torch.bfloat16
    model = folders.with_weights(folders.qwen3(), tmp_path)
    kept_groups.check(Checkpoint(tmp_path, "huggingface"), model)


def test_matrices_without_memory_have_the_shapes_of_the_model(tmp_path: Path) -> None:
    folders.write(folders.qwen3(), tmp_path, config(), encoded)
    weights = folders.opened(tmp_path, "meta")
    found = weights.read_matrix(DOWN)
    assert isinstance(found, GroupedMatrix) and found.codes.is_meta and found.shape == (64, 96)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_scale": None}, f"the tensor '{DOWN}_scale' is missing"),
        ({"_shape": None}, f"the tensor '{DOWN}_shape' is missing"),
        ({"_packed": None}, f"'{DOWN}_shape' has the type I64, and belongs to no quantised weight"),
        (
            {"_packed": torch.zeros(64, 11, dtype=torch.int32)},
            f"'{DOWN}_packed' has the shape [64, 11]; expected [64, 12]",
        ),
        (
            {"_packed": torch.zeros(64, 12, dtype=torch.uint8)},
            f"'{DOWN}_packed' has the type U8, and belongs to no quantised weight",
        ),
        (
            {"_scale": torch.ones(64, 2)},
            f"'{DOWN}_scale' has the shape [64, 2]; expected [64, 3]",
        ),
        (
            {"_scale": torch.ones(64, 3, dtype=torch.int32)},
            f"'{DOWN}_scale' has the type I32; expected F32 or F16 or BF16",
        ),
        ({"_scale": torch.full((64, 3), torch.nan)}, f"'{DOWN}_scale' has values that are not"),
        ({"_shape": torch.tensor([0, 96])}, f"'{DOWN}_shape' is [0, 96]; expected rows and"),
        (
            {"_shape": torch.tensor([64, 1 << 60])},
            f"'{DOWN}_packed' has the shape [64, 12]; expected [64, {1 << 57}]",
        ),
        (
            {"_shape": torch.tensor([64, 95])},
            f"'{DOWN}_packed' has 95 columns; expected a multiple",
        ),
        (
            {"_zero_point": torch.zeros(8, 3, dtype=torch.int32)},
            f"'{DOWN}_zero_point' exists; expected none, as config.json says `symmetric`",
        ),
        (
            {"_g_idx": torch.tensor([3] * 96)},
            f"'{DOWN}_g_idx' names groups from 3 to 3; expected 0 to 2",
        ),
        ({"_g_idx": torch.tensor([-2] * 96)}, "names groups from -2 to -2; expected 0 to 2"),
        ({"_g_idx": torch.zeros(95, dtype=torch.int32)}, "has the shape [95]; expected [96]"),
        ({"": torch.zeros(64, 96)}, f"the weight '{DOWN}' is stored twice"),
    ],
)
def test_a_damaged_folder_is_refused_by_the_name_of_a_tensor(
    tmp_path: Path, changes: dict[str, Tensor | None], message: str
) -> None:
    tensors: dict[str, Tensor | None] = {}
    tensors |= folders.write(folders.qwen3(), tmp_path, config(), encoded)
    tensors |= {f"{DOWN}{suffix}": tensor for suffix, tensor in changes.items()}
    folders.save({name: one for name, one in tensors.items() if one is not None}, tmp_path)
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        folders.opened(tmp_path).read(DOWN)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"symmetric": False}, f"'{DOWN}_zero_point' is missing"),
        ({"actorder": "group"}, f"'{DOWN}_g_idx' is missing"),
    ],
)
def test_what_config_json_promises_must_be_there(
    tmp_path: Path, settings_: dict[str, Any], message: str
) -> None:
    folders.write(
        folders.qwen3(),
        tmp_path,
        config(**settings_),
        lambda module, weight: (
            encoded(module, weight) if module in DOWN else {f"{module}weight": weight}
        ),
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        folders.opened(tmp_path)
