"""Tiny models as GGUF files, written as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

import tiny
from inflight.checkpoint.locate import Checkpoint

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_name(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    _, _, layer, *module, kind = name.split(".")
    return f"blk.{layer}.{_NAMES['.'.join(module)]}.{kind}"


def pairs_from_halves(values: np.ndarray, heads: int) -> np.ndarray:
    """The row order of GGUF, whose rotary embedding turns neighbours."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def quantised(name: str, kind: gguf.GGMLQuantizationType) -> bool:
    """As in real files: matrices are, norms and biases stay float32."""
    return name.endswith(".weight") and "norm" not in name and kind.name != "F32"


def rounded(
    weights: dict[str, torch.Tensor], kind: gguf.GGMLQuantizationType
) -> dict[str, torch.Tensor]:
    """What is left of the weights after quantising them."""
    return {
        name: torch.from_numpy(gguf.dequantize(gguf.quantize(tensor.numpy(), kind), kind).copy())
        if quantised(name, kind)
        else tensor
        for name, tensor in weights.items()
    }


def write_gguf(
    path: Path,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    weights: dict[str, torch.Tensor] | None = None,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    architecture: str = "llama",
    **changes: Any,
) -> Checkpoint:
    """Write a file; `metadata` adds or replaces keys of the architecture (None leaves one out).

    Only Llama's converter orders q and k for a rotation of neighbours.
    """
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
    for name, tensor in weights.items():
        values = tensor.numpy()
        for letter, count in heads.items():
            if architecture == "llama" and f".{letter}_proj." in name:
                values = pairs_from_halves(values, count)
        if quantised(name, kind):
            writer.add_tensor(gguf_name(name), gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), values)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Checkpoint(path, "gguf")
