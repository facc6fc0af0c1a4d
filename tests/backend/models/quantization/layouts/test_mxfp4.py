"""Experts of gpt-oss in MXFP4 are what transformers makes of them."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GptOssConfig

import family
import grouped_folders as folders
import kept_groups
from inflight.checkpoint.locate import Checkpoint
from inflight.cli.inspection.summary import summarize
from inflight.config import EngineConfig
from inflight.errors import ConfigError
from inflight.models.quantization.grouped import GroupedMatrix

SETTINGS = family.SHAPE | {"pad_token_id": 0, "num_hidden_layers": 2, "num_local_experts": 4}
EXPERTS = "model.layers.0.mlp.experts."
MAGNITUDES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def write(folder: Path) -> tuple[Any, dict[str, Tensor]]:
    """A model and a folder's tensors. Tokens have all experts, so that no choice changes where
    activations are rounded."""
    model = family.make(GptOssConfig(**SETTINGS, num_experts_per_tok=4))
    return model, folders.write_mxfp4(model, folder)


def test_logits_equal_those_of_transformers(tmp_path: Path) -> None:
    model, _ = write(tmp_path)
    checkpoint = Checkpoint(tmp_path, "huggingface")
    kept_groups.check(checkpoint, model)
    found = summarize(EngineConfig(model=str(tmp_path), device="cpu"), checkpoint)
    assert found.quantization == "MXFP4"


def test_each_value_is_that_of_the_formula(tmp_path: Path) -> None:
    """Rows of gate and up by turns in the file, gate | up as we read them."""
    _, tensors = write(tmp_path)
    weights = folders.opened(tmp_path)
    for stem, order in (
        ("gate_up_proj", [*range(0, 192, 2), *range(1, 192, 2)]),
        ("down_proj", range(64)),
    ):
        blocks, scales = tensors[f"{EXPERTS}{stem}_blocks"], tensors[f"{EXPERTS}{stem}_scales"]
        found = weights.read(f"{EXPERTS}{stem}.3.weight")
        assert found.shape == (len(order), 32 * scales.shape[2])
        for row, stored in enumerate(order):
            for column in range(found.shape[1]):
                byte = int(blocks[3, stored, column // 32, column % 32 // 2])
                code = byte >> 4 if column % 2 else byte & 15
                value = math.copysign(MAGNITUDES[code & 7], -1 if code & 8 else 1)
                assert found[row, column] == value * 2.0 ** (
                    int(scales[3, stored, column // 32]) - 127
                )
        matrix = weights.read_matrix(f"{EXPERTS}{stem}.3.weight")
        assert isinstance(matrix, GroupedMatrix) and (matrix.bits, matrix.group) == (4, 32)


def test_scales_reach_from_the_smallest_to_the_largest(tmp_path: Path) -> None:
    _, tensors = write(tmp_path)
    tensors[f"{EXPERTS}down_proj_blocks"][0, 0, 0] = 0x22  # ones
    tensors[f"{EXPERTS}down_proj_blocks"][0, 0, 1] = 0x22
    tensors[f"{EXPERTS}down_proj_scales"][0, 0, :2] = torch.tensor([0, 254])
    folders.save(tensors, tmp_path)
    found = folders.opened(tmp_path).read(f"{EXPERTS}down_proj.0.weight")
    assert (found[0, 0].item(), found[0, 32].item()) == (2.0**-127, 2.0**127)


def test_matrices_without_memory_have_the_shapes_of_the_model(tmp_path: Path) -> None:
    write(tmp_path)
    found = folders.opened(tmp_path, "meta").read_matrix(f"{EXPERTS}gate_up_proj.1.weight")
    assert isinstance(found, GroupedMatrix) and found.codes.is_meta and found.shape == (192, 64)


DOWN = f"{EXPERTS}down_proj"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_scales": None}, f"the tensor '{DOWN}_scales' is missing"),
        ({"_blocks": None}, f"'{DOWN}_scales' has the type U8, and belongs to no quantised"),
        (
            {"_blocks": torch.zeros(4, 64, 48, dtype=torch.uint8)},
            f"'{DOWN}_blocks' has the shape [4, 64, 48]; expected experts' [E, n, k / 32, 16]",
        ),
        (
            {"_blocks": torch.zeros(4, 64, 3, 8, dtype=torch.uint8)},
            f"'{DOWN}_blocks' has the shape [4, 64, 3, 8]",
        ),
        (
            {"_scales": torch.zeros(4, 64, 2, dtype=torch.uint8)},
            f"'{DOWN}_scales' has the shape [4, 64, 2]; expected [4, 64, 3]",
        ),
        ({"_scales": torch.ones(4, 64, 3)}, f"'{DOWN}_scales' has the type F32; expected U8"),
        (
            {"_scales": torch.full((4, 64, 3), 255, dtype=torch.uint8)},
            f"'{DOWN}_scales' has values that are not finite",
        ),
        ({"": torch.zeros(4, 96, 64)}, f"'{DOWN}.0.weight' is stored twice"),
    ],
)
def test_a_damaged_folder_is_refused_by_the_name_of_a_tensor(
    tmp_path: Path, changes: dict[str, Tensor | None], message: str
) -> None:
    tensors: dict[str, Any] = dict(write(tmp_path)[1])
    tensors |= {f"{DOWN}{suffix}": tensor for suffix, tensor in changes.items()}
    folders.save({name: one for name, one in tensors.items() if one is not None}, tmp_path)
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        folders.opened(tmp_path).read(f"{DOWN}.0.weight")
    assert str(tmp_path) in str(caught.value)
