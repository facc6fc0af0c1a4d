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
    "mlp.experts.gate_up_proj_bias": ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
    "mlp.experts.down_proj_bias": ("ffn_down_exps.bias",),
    "mlp.router.weight": ("ffn_gate_inp",),
    "mlp.router.bias": ("ffn_gate_inp.bias",),
    "self_attn.sinks": ("attn_sinks.weight",),
    "mlp.gate.weight": ("ffn_gate_inp",),
    "mlp.gate.e_score_correction_bias": ("exp_probs_b.bias",),
    "mlp.shared_experts.gate_proj.weight": ("ffn_gate_shexp",),
    "mlp.shared_experts.up_proj.weight": ("ffn_up_shexp",),
    "mlp.shared_experts.down_proj.weight": ("ffn_down_shexp",),
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


def is_stack(name: str) -> bool:
    """Whether a tensor in memory stacks the matrices of experts."""
    return ".experts." in name and name.endswith("_proj")


def are_transposed(weights: dict[str, Tensor]) -> bool:
    return any(name.endswith("gate_up_proj_bias") for name in weights)


def canonical(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same with the experts of gpt-oss, whose matrices are transposed and whose rows of gate
    and up take turns, as [E, rows, columns] and gate | up."""
    if not are_transposed(weights):
        return weights
    found = {}
    for name, tensor in weights.items():
        rows = tensor.mT if is_stack(name) else tensor
        if ".experts.gate_up_proj" in name:
            rows = torch.cat([rows[:, ::2], rows[:, 1::2]], 1)
        found[name] = rows.contiguous()
    return found


def stacked(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weights with those of mixtures of experts under their names in GGUF files."""
    found = {}
    for name, tensor in canonical(weights).items():
        match = _LAYER.fullmatch(name)
        parts = _SLOTS.get(match[2], ()) if match else ()
        if not match or not parts:
            found[name] = tensor
            continue
        chunks = (
            [tensor]
            if len(parts) == 1
            else torch.chunk(tensor, len(parts), dim=1 if "experts" in name else 0)
        )
        for part, rows in zip(parts, chunks, strict=True):
            suffix = "" if "." in part else ".weight"
            # The converter squeezes a matrix of one row.
            found[f"blk.{match[1]}.{part}{suffix}"] = rows.contiguous().squeeze()
    return found
