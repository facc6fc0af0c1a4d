"""Matrices of bitsandbytes are what its formula makes of them."""

from __future__ import annotations

import json
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

CONFIG = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "load_in_8bit": False,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
}
DOWN = "model.layers.0.mlp.down_proj.weight"  # [64, 96]
STATE = f"{DOWN}.quant_state.bitsandbytes__nf4"
TABLES = {
    # QLoRA, appendix E.
    "nf4": torch.tensor(
        [
            *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
            *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
            *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
            *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
        ]
    ),
    "fp4": torch.tensor([0, 0.0625, 8, 12, 4, 6, 2, 3, -0.0, -0.0625, -8, -12, -4, -6, -2, -3])
    / 12,
}
NESTED_BLOCK, OFFSET = 16, 0.04
NESTED_TABLE = torch.linspace(-1, 1, 256)


def encoded(
    module: str, weight: Tensor, kind: str = "nf4", block: int = 64, nested: bool = True
) -> dict[str, Tensor]:
    """Random codes."""
    n, k = weight.shape
    codes = folders.drawn_codes(n, k, 4).flatten().tolist()
    num_blocks = -(-n * k // block)
    name = f"{module}weight"
    state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16"}
    state["shape"] = [n, k]
    found = {
        name: torch.tensor(
            [[high << 4 | low] for high, low in zip(codes[::2], codes[1::2], strict=True)]
        ),
        f"{name}.quant_map": TABLES[kind],
        f"{name}.absmax": folders.drawn_scales(1, num_blocks, torch.float32)[0],
    }
    if nested:
        count = -(-num_blocks // NESTED_BLOCK)
        found[f"{name}.absmax"] = folders.drawn_codes(1, num_blocks, 8)[0].to(torch.uint8)
        found[f"{name}.nested_absmax"] = folders.drawn_scales(1, count, torch.float32)[0]
        found[f"{name}.nested_quant_map"] = NESTED_TABLE
        state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32"}
        state["nested_offset"] = OFFSET
    found[name] = found[name].to(torch.uint8)
    found[f"{name}.quant_state.bitsandbytes__{kind}"] = as_bytes(state)
    return found


def as_bytes(state: Any) -> Tensor:
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


def check_values(folder: Path, tensors: dict[str, Tensor], kind: str, block: int) -> Any:
    """Each value of DOWN is that of the formula."""
    codes, absmax = folders.drawn_codes(64, 96, 4), tensors[f"{DOWN}.absmax"]
    nested = tensors.get(f"{DOWN}.nested_absmax")
    weights = folders.opened(folder)
    found = weights.read(DOWN)
    for row in range(64):
        for column in range(96):
            at = (row * 96 + column) // block
            scale = absmax[at]
            if nested is not None:
                scale = NESTED_TABLE[int(scale)] * nested[at // NESTED_BLOCK] + OFFSET
            assert found[row, column] == TABLES[kind][codes[row, column]] * scale
    return weights.read_matrix(DOWN)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "plain"])
@pytest.mark.parametrize(("block", "group"), [(32, 32), (64, 32), (4096, 32), (96, 96), (40, None)])
def test_each_value_is_that_of_the_formula(
    tmp_path: Path, kind: str, nested: bool, block: int, group: int | None
) -> None:
    """Blocks go on from row to row, and a group lies within one block."""
    tensors = folders.write(
        folders.qwen3(),
        tmp_path,
        CONFIG | {"bnb_4bit_quant_type": kind},
        lambda module, weight: encoded(module, weight, kind, block, nested),
    )
    matrix = check_values(tmp_path, tensors, kind, block)
    if group is None:
        assert isinstance(matrix, Tensor)
    else:
        assert isinstance(matrix, GroupedMatrix) and (matrix.bits, matrix.group) == (4, group)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bytes_may_be_stored_as_another_type(tmp_path: Path, dtype: torch.dtype) -> None:
    """bnb_4bit_quant_storage"""
    tensors = folders.write(folders.qwen3(), tmp_path, CONFIG, encoded)
    for name in [name for name in tensors if folders.LINEAR.fullmatch(name)]:
        tensors[name] = tensors[name].flatten().view(dtype)[:, None]
    folders.save(tensors, tmp_path)
    check_values(tmp_path, tensors, "nf4", 64)


def test_logits_equal_those_of_the_dequantised_weights(tmp_path: Path) -> None:
    def encode(module: str, weight: Tensor) -> dict[str, Tensor]:
        plain = {f"{module}weight": weight.half()}
        return plain if "layers.1.mlp" in module else encoded(module, weight)

    config = CONFIG | {"llm_int8_skip_modules": ["lm_head", "model.layers.1.mlp"]}
    folders.write(folders.qwen3(), tmp_path, config, encode)
    model = folders.with_weights(folders.qwen3(), tmp_path)
    kept_groups.check(Checkpoint(tmp_path, "huggingface"), model)


def state(**changes: Any) -> dict[str, Tensor]:
    found = {"quant_type": "nf4", "blocksize": 64, "shape": [64, 96], "nested_blocksize": 16}
    return {STATE: as_bytes(found | {"nested_offset": 0.1} | changes)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{DOWN}.absmax": None}, f"the tensor '{DOWN}.absmax' is missing"),
        ({f"{DOWN}.quant_map": None}, f"the tensor '{DOWN}.quant_map' is missing"),
        ({f"{DOWN}.nested_quant_map": None}, f"the tensor '{DOWN}.nested_quant_map' is missing"),
        ({f"{DOWN}.nested_absmax": None}, f"'{DOWN}.absmax' has the type U8; expected F32"),
        ({DOWN: None}, f"the tensor '{DOWN}' is missing"),
        ({STATE: None}, "has the type U8, and belongs to no quantised weight"),
        ({STATE: torch.zeros(4, dtype=torch.uint8)}, f"'{STATE}' cannot be read ("),
        ({STATE: torch.zeros(70000, dtype=torch.uint8)}, f"'{STATE}' has the shape [70000]"),
        (state(shape=[64, 98]), f"'{DOWN}' has 3072 bytes; expected 3136, for [64, 98]"),
        (state(shape=[64]), f"'{STATE}' cannot be read ("),
        (state(shape=[0, 96]), f"'{STATE}' has shape [0, 96] and blocksize 64"),
        (state(blocksize=0), f"'{STATE}' has shape [64, 96] and blocksize 0"),
        (state(blocksize=1 << 40), f"'{STATE}' has shape [64, 96] and blocksize {1 << 40}"),
        (state(nested_blocksize=0), f"'{STATE}' has nested_blocksize 0"),
        (state(nested_offset=1e400), f"'{STATE}' cannot be read ("),
        (state(shape=[96, 64]), f"{DOWN} [96, 64], expected [64, 96]"),
        (
            {f"{DOWN}.absmax": torch.zeros(97, dtype=torch.uint8)},
            f"'{DOWN}.absmax' has the shape [97]; expected [96]",
        ),
        ({f"{DOWN}.quant_map": torch.ones(8)}, "quant_map' has the shape [8]; expected [16]"),
        (
            {f"{DOWN}.quant_map": torch.full((16,), torch.nan)},
            f"'{DOWN}.quant_map' has values that are not finite",
        ),
        (
            {f"{DOWN}.nested_absmax": torch.full((6,), torch.inf)},
            f"'{DOWN}.absmax' has values that are not finite",
        ),
    ],
)
def test_a_damaged_folder_is_refused_by_the_name_of_a_tensor(
    tmp_path: Path, changes: dict[str, Tensor | None], message: str
) -> None:
    tensors: dict[str, Any] = dict(folders.write(folders.qwen3(), tmp_path, CONFIG, encoded))
    tensors |= changes
    folders.save({name: one for name, one in tensors.items() if one is not None}, tmp_path)
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        folders.opened(tmp_path).read(DOWN)
    assert str(tmp_path) in str(caught.value)
