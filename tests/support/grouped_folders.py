"""Folders of tiny random models with linear layers in formats of codes with scales of groups."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import family
from inflight.checkpoint.locate import Checkpoint
from inflight.models.loader import weight_shapes
from inflight.models.quantization import compressed
from inflight.models.registry import read_spec
from inflight.models.stored.weights import Weights, open_weights

LINEAR = re.compile(r"model\.layers\.\d+\..*proj\.weight")
Encode = Callable[[str, Tensor], dict[str, Tensor]]
"""The tensors in the place of a weight, given its module's name with a dot and its values."""


def qwen3(**changes: Any) -> Any:
    """A model of two layers; widths are 64, 96 and 128."""
    return family.make(Qwen3Config(**family.SHAPE | {"num_hidden_layers": 2} | changes))


def write(model: Any, folder: Path, config: dict[str, Any], encode: Encode) -> dict[str, Tensor]:
    """Write a folder whose linear layers are quantised; all its tensors."""
    model.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if LINEAR.fullmatch(name)]:
        tensors |= encode(name.removesuffix("weight"), tensors.pop(name))
    save(tensors, folder)
    return tensors


def write_mixed(folder: Path) -> dict[str, Tensor]:
    """FP8 in attention, 4 bits in MLPs."""
    schemes = {
        kind: compressed.config(kind, {32: ["x"]}, [])["config_groups"]["group_0"]
        for kind in ("fp8", "int4")
    }
    schemes["fp8"]["format"], schemes["int4"]["format"] = "float-quantized", "pack-quantized"
    schemes["int4"]["weights"]["group_size"] = 64
    second = json.loads(json.dumps(schemes["int4"]))
    second["weights"]["group_size"] = 32
    config = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": {"a": schemes["fp8"], "b": schemes["int4"], "c": second},
    }

    def encode(module: str, weight: Tensor) -> dict[str, Tensor]:
        return compressed.tensors(f"{module}weight", weight, "fp8" if "attn" in module else "int4")

    return write(qwen3(), folder, config, encode)


_MXFP4_CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
}


def write_mxfp4(model: Any, folder: Path, largest: int = -2) -> dict[str, Tensor]:
    """A folder as the hub has it; all its tensors.

    Args:
        model: of gpt-oss; its experts become what transformers makes of those of the folder.
        folder: to write.
        largest: exponent of scales; others are up to 4 less.
    """
    model.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"quantization_config": _MXFP4_CONFIG})
    )
    tensors, random = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
    state = model.state_dict()
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        count, k, n = tensors.pop(name).shape  # of products x @ w
        shape = (count, n, k // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=random, dtype=torch.uint8)
        scales = torch.randint(123, 128, shape, generator=random, dtype=torch.uint8) + largest
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        state[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    model.load_state_dict(state)
    save(tensors, folder)
    return tensors


def save(tensors: dict[str, Tensor], folder: Path) -> None:
    """Replace the tensors of a folder."""
    found = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(found, folder / "model.safetensors", {"format": "pt"})


def opened(folder: Path, device: str = "cpu") -> Weights:
    """The weights of a folder."""
    checkpoint = Checkpoint(folder, "huggingface")
    spec = read_spec(checkpoint)
    return open_weights(checkpoint, spec, weight_shapes(spec), device)


def with_weights(model: Any, folder: Path) -> Any:
    """A copy of a model with the weights of a folder as we read them."""
    weights = opened(folder)
    found = type(model)(model.config)
    found.load_state_dict({name: weights.read(name) for name in model.state_dict()})
    return found.eval().float()


def words(codes: list[int], bits: int) -> list[int]:
    """Codes packed into signed words of 32 bits, the first in the lowest bits."""
    packed = []
    for first in range(0, len(codes), 32 // bits):
        word = 0
        for place, code in enumerate(codes[first : first + 32 // bits]):
            word |= code << (place * bits)
        packed.append(word - (1 << 32) if word >= 1 << 31 else word)
    return packed


def packed_rows(codes: Tensor, bits: int) -> Tensor:
    """[n, k] as [n, k * bits / 32] int32."""
    return torch.tensor([words(row, bits) for row in codes.tolist()], dtype=torch.int32)


def drawn_codes(n: int, k: int, bits: int, seed: int = 0) -> Tensor:
    """[n, k] int64."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1 << bits, (n, k), generator=random)


def drawn_scales(n: int, k: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> Tensor:
    """[n, k], positive."""
    random = torch.Generator().manual_seed(seed)
    return (0.01 + 0.02 * torch.rand(n, k, generator=random)).to(dtype)
