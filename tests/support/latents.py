"""Latent attention in the tensors of transformers, and in those of llama.cpp's converter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

HeadDims = tuple[int, int]
"""Columns of a head's key without RoPE, and of its value."""

_BOTH = "self_attn.kv_b_proj.weight"


def head_dims(settings: dict[str, Any]) -> HeadDims | None:
    """Of a model's settings; None without latent attention."""
    if "kv_lora_rank" not in settings:
        return None
    return settings["qk_nope_head_dim"], settings["v_head_dim"]


def is_joined(name: str) -> bool:
    """Whether a tensor makes keys and values of latents."""
    return name.endswith(_BOTH)


def split(joined: Tensor, dims: HeadDims) -> tuple[Tensor, Tensor]:
    """k_b [H, rank, N] and v_b [H, V, rank] of kv_b [H * (N + V), rank]."""
    heads = joined.view(-1, sum(dims), joined.shape[1])
    keys, values = torch.split(heads, dims, 1)
    return keys.mT.contiguous(), values.contiguous()


def each_part(joined: Tensor, dims: HeadDims, change: Callable[[Tensor], Tensor]) -> Tensor:
    """kv_b after a change of k_b and v_b."""
    keys, values = map(change, split(joined, dims))
    return torch.cat([keys.mT, values], 1).flatten(0, 1)


def named(weights: dict[str, Tensor], dims: HeadDims) -> dict[str, Tensor]:
    """The same weights with k_b and v_b in place of kv_b."""
    found = {}
    for name, tensor in weights.items():
        if not is_joined(name):
            found[name] = tensor
            continue
        layer = name.removesuffix(_BOTH)
        keys, values = split(tensor, dims)
        found[f"{layer}self_attn.k_b_proj.weight"] = keys
        found[f"{layer}self_attn.v_b_proj.weight"] = values
    return found
