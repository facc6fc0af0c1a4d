"""Mixtral (arXiv:2401.04088): Mistral with experts."""

from __future__ import annotations

from inflight.models.family import EXPERTS, Family, Settings
from inflight.models.spec import LayerSpec


def layers(settings: Settings) -> list[LayerSpec]:
    attention = settings.attention(window=settings.window())
    moe = settings.moe(settings.mlp(), renormalize=True)
    return [LayerSpec(attention, moe)] * settings.num_layers


FAMILY = Family(
    name="mixtral",
    layers=layers,
    model_types=("mixtral",),
    # Its files say llama: see `registry`.
    gguf_architectures=("mixtral",),
    tensors={
        **EXPERTS,
        "router": ("block_sparse_moe.gate", "ffn_gate_inp"),
        "expert_gate": ("block_sparse_moe.experts.{}.w1", "ffn_gate_exps"),
        "expert_up": ("block_sparse_moe.experts.{}.w3", "ffn_up_exps"),
        "expert_down": ("block_sparse_moe.experts.{}.w2", "ffn_down_exps"),
    },
    rope_pairs=("gguf",),
    # Noise of training.
    ignored_keys=frozenset({"router_jitter_noise"}),
)
