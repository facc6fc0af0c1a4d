"""Mixtures of experts in the tensors of transformers, and in those of llama.cpp's converter."""

from __future__ import annotations

import re

import torch
from torch import Tensor

_ROUTER = re.compile(r".*(\.gate|\.router|\.shared_expert_gate|\.ffn_gate_inp\w*)\.weight")
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_SLOTS = {
    "mlp.experts.gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"),
    "mlp.experts.down_proj": ("ffn_down_exps",),
    "block_sparse_moe.experts.gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"),
    "block_sparse_moe.experts.down_proj": ("ffn_down_exps",),
    "mlp.gate.weight": ("ffn_gate_inp",),
    "block_sparse_moe.router.weight": ("ffn_gate_inp",),
    "mlp.shared_expert.gate_proj.weight": ("ffn_gate_shexp",),
    "mlp.shared_expert.up_proj.weight": ("ffn_up_shexp",),
    "mlp.shared_expert.down_proj.weight": ("ffn_down_shexp",),
    "mlp.shared_expert_gate.weight": ("ffn_gate_inp_shexp",),
    "shared_mlp.input_linear.weight": ("ffn_gate_shexp", "ffn_up_shexp"),
    "shared_mlp.output_linear.weight": ("ffn_down_shexp",),
}
"""Names in memory since transformers 5, and those of the rows' parts in a GGUF file."""


def is_router(name: str) -> bool:
    """Whether a tensor scores experts."""
    return _ROUTER.fullmatch(name) is not None


def stacked(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weights with those of mixtures of experts under their names in GGUF files."""
    found = {}
    for name, tensor in weights.items():
        match = _LAYER.fullmatch(name)
        parts = _SLOTS.get(match[2], ()) if match else ()
        if not match or not parts:
            found[name] = tensor
            continue
        for part, rows in zip(parts, torch.chunk(tensor, len(parts), dim=-2), strict=True):
            # The converter squeezes a matrix of one row.
            values = rows.contiguous().squeeze()
            found[f"blk.{match[1]}.{part}.weight"] = values
    return found
