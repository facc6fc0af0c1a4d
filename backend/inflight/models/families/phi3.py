"""Phi 3, 3.5 and 4 (arXiv:2404.14219): Llama with fused tensors, RoPE of a part of each head, and
LongRoPE (arXiv:2402.13753).
"""

from __future__ import annotations

from inflight.models.family import TENSORS, Family, Settings, Slot
from inflight.models.spec import LayerSpec

_QKV: Slot = ("self_attn.qkv_proj", "attn_qkv")
_GATE_UP: Slot = ("mlp.gate_up_proj", "ffn_up")


def layers(settings: Settings) -> list[LayerSpec]:
    attention = settings.attention(window=settings.window())
    return [LayerSpec(attention, settings.mlp())] * settings.num_layers


FAMILY = Family(
    name="phi3",
    layers=layers,
    model_types=("phi3",),
    gguf_architectures=("phi3",),
    tensors={**TENSORS, "q": _QKV, "k": _QKV, "v": _QKV, "gate": _GATE_UP, "up": _GATE_UP},
)
