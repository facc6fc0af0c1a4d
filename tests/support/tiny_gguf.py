"""Tiny models as GGUF files, written as llama.cpp's converter writes them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

import experts
import latents
import tiny
from inflight.checkpoint.locate import Checkpoint

_ORDERED = ("llama", "granite", "granitemoe", "smollm3", "mistral3")
"""Architectures whose converter orders q and k for a rotation of neighbours."""
_ONE_ADDED = ("gemma", "gemma2", "gemma3", "nemotron")
"""Architectures whose converter adds one to the weights of norms."""


@functools.cache
def _names(architecture: str) -> gguf.TensorNameMap:
    (arch,) = (kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    return gguf.get_tensor_name_map(arch, 16)


def gguf_name(name: str, architecture: str = "llama") -> str:
    """A tensor's name, by the map of llama.cpp's converter."""
    if name.startswith("blk."):
        return name
    found = _names(architecture).get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


def pairs_from_halves(values: np.ndarray, heads: int) -> np.ndarray:
    """The row order of GGUF, whose rotary embedding turns neighbours."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def quantised(name: str, kind: gguf.GGMLQuantizationType) -> bool:
    """As in real files: matrices are, norms, biases and routers stay float32."""
    is_matrix = name.endswith(".weight") or experts.is_stack(name)
    is_small = "norm" in name or "sinks" in name or experts.is_router(name)
    return is_matrix and not is_small and kind.name != "F32"


def rounded(
    weights: dict[str, torch.Tensor],
    kind: gguf.GGMLQuantizationType,
    up_dims: latents.HeadDims | None = None,
) -> dict[str, torch.Tensor]:
    """What is left of the weights after quantising them, those of latents by parts of `up_dims`."""

    def rows_rounded(tensor: torch.Tensor) -> torch.Tensor:
        values = gguf.quantize(np.ascontiguousarray(tensor.numpy()), kind)
        return torch.from_numpy(gguf.dequantize(values, kind).copy())

    transposed = experts.are_transposed(weights)
    found = dict(weights)
    for name, tensor in weights.items():
        if quantised(name, kind):
            if up_dims is not None and latents.is_joined(name):
                found[name] = latents.each_part(tensor, up_dims, rows_rounded)
                continue
            is_turned = transposed and experts.is_stack(name)
            found[name] = rows_rounded(tensor.mT).mT if is_turned else rows_rounded(tensor)
    return found


def write_gguf(
    path: Path,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    weights: dict[str, torch.Tensor] | None = None,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    architecture: str = "llama",
    up_dims: latents.HeadDims | None = None,
    **changes: Any,
) -> Checkpoint:
    """Write a file; `metadata` adds or replaces keys of the architecture (None leaves one out), and
    with `up_dims` keys and values are made of latents by tensors of their own."""
    settings = tiny.SETTINGS | changes
    if weights is None:
        weights = tiny.random_weights(settings)
    writer = gguf.GGUFWriter(path, architecture)
    keys = {
        "context_length": settings["max_position_embeddings"],
        "embedding_length": settings["hidden_size"],
        "feed_forward_length": settings["intermediate_size"],
        "block_count": settings["num_hidden_layers"],
        "attention.head_count": settings["num_attention_heads"],
        "attention.head_count_kv": settings["num_key_value_heads"],
        "attention.key_length": settings["head_dim"],
        "attention.value_length": settings["head_dim"],
        "attention.layer_norm_rms_epsilon": settings["rms_norm_eps"],
        "rope.freq_base": settings["rope_theta"],
        "rope.dimension_count": settings["head_dim"],
    } | (metadata or {})
    for key, value in keys.items():
        if isinstance(value, str):
            writer.add_string(f"{architecture}.{key}", value)
        elif isinstance(value, bool):
            writer.add_bool(f"{architecture}.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{architecture}.{key}", value)
        elif isinstance(value, list):
            writer.add_array(f"{architecture}.{key}", value)
        elif value is not None:
            writer.add_uint32(f"{architecture}.{key}", value)
    # The vocabulary's size is stated by its array alone.
    writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(settings["vocab_size"])])
    writer.add_array("tokenizer.ggml.scores", [0.5] * settings["vocab_size"])
    writer.add_uint32("tokenizer.ggml.bos_token_id", settings["bos_token_id"])
    writer.add_uint32("tokenizer.ggml.eos_token_id", settings["eos_token_id"])
    writer.add_uint32("tokenizer.ggml.eot_token_id", 3)
    heads = {"q": settings["num_attention_heads"], "k": settings["num_key_value_heads"]}
    if up_dims is not None:
        weights = latents.named(weights, up_dims)
    for name, tensor in experts.stacked(weights).items():
        values = tensor.numpy()
        for letter, count in heads.items():
            if architecture in _ORDERED and f".{letter}_proj." in name:
                values = pairs_from_halves(values, count)
        if architecture in _ONE_ADDED and name.endswith("norm.weight"):
            values = values + 1
        stored = gguf_name(name, architecture)
        if quantised(name, kind):
            writer.add_tensor(stored, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, values)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Checkpoint(path, "gguf")


def drawn_blocks(kind: gguf.GGMLQuantizationType, count: int, seed: int = 0) -> np.ndarray:
    """[count, bytes] of random blocks of finite values, also in types that gguf cannot write."""
    _, size = gguf.GGML_QUANT_SIZES[kind]
    drawn = np.random.default_rng(seed).integers(0, 256, (2 * count + 64, size), np.uint8)
    with np.errstate(all="ignore"):
        is_finite = np.isfinite(gguf.dequantize(drawn, kind)).all(1)
    found: np.ndarray = drawn[is_finite][:count]
    assert len(found) == count
    return found


def write_tensors(
    path: Path, tensors: dict[str, tuple[gguf.GGMLQuantizationType, np.ndarray]]
) -> Path:
    """A file of tensors alone: a type, and their bytes [..., bytes of a row]."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, (kind, data) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
