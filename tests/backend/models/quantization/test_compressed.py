"""Weights and settings in the format of compressed-tensors, by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inflight.models.quantization import compressed

NAME = "model.layers.0.mlp.up_proj.weight"


def test_int4_is_packed_with_the_first_code_in_the_lowest_bits() -> None:
    weight = torch.zeros(1, 32)
    weight[0, :3] = torch.tensor([7.5, -7.5, 2.0])
    found = compressed.tensors(NAME, weight, "int4")
    assert found[f"{NAME}_scale"].tolist() == [[1.0]]
    assert found[f"{NAME}_shape"].tolist() == [1, 32]
    # 7.5 is half a step beyond the last code, -7.5 rounds to the even -8, and the others are 8.
    words = [word & 0xFFFFFFFF for word in found[f"{NAME}_packed"][0].tolist()]
    assert [f"{word:08X}" for word in words] == ["88888A0F", "88888888", "88888888", "88888888"]


@pytest.mark.parametrize(("kind", "dtype"), [("fp8", torch.float8_e4m3fn), ("int8", torch.int8)])
def test_8_bits_have_a_scale_for_each_row(kind: str, dtype: torch.dtype) -> None:
    found = compressed.tensors(NAME, torch.randn(3, 40), kind)
    assert found[NAME].dtype == dtype and found[f"{NAME}_scale"].shape == (3, 1)
    assert compressed.group_in(kind, 40) == 40 and compressed.group_in("int4", 40) is None


@pytest.mark.parametrize(
    ("kind", "form", "weights"),
    [
        ("fp8", "float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
        ("int8", "int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
        ("int4", "pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 128}),
    ],
)
def test_one_size_of_groups_is_that_of_all_linear_layers(
    kind: str, form: str, weights: dict[str, Any]
) -> None:
    found = compressed.config(kind, {128: ["a"]}, ["mlp.gate"])
    assert (found["format"], found["ignore"]) == (form, ["lm_head", "mlp.gate"])
    (group,) = found["config_groups"].values()
    assert group["targets"] == ["Linear"]
    assert group["weights"] | weights == group["weights"]
    assert (group["input_activations"] is None) == (kind == "int4")


def test_several_sizes_of_groups_name_their_modules() -> None:
    found = compressed.config("int4", {128: ["a", "b"], 32: ["c"]}, [])
    targets = [group["targets"] for group in found["config_groups"].values()]
    assert targets == [["a", "b"], ["c"]]
