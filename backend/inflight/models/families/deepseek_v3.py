"""DeepSeek V3, R1 and V3.1 (arXiv:2412.19437): V2 with another routing of experts."""

from __future__ import annotations

from typing import Any

from inflight.models.families import deepseek_v2
from inflight.models.family import Family, Settings
from inflight.models.spec import LayerSpec

EXPERT_TENSORS = {
    **deepseek_v2.EXPERT_TENSORS,
    "select_bias": ("mlp.gate.e_score_correction_bias", "exp_probs_b.bias"),
}

_SIGMOID = 2  # of llama.cpp's gating functions


def routing(settings: Settings) -> dict[str, Any]:
    """The arguments of `MoeSpec` for V3's routing, which other families have as well."""
    deepseek_v2.check_value(settings, "scoring_func", "sigmoid")
    deepseek_v2.check_value(settings, "topk_method", "noaux_tc")
    deepseek_v2.check_value(settings, "expert_gating_func", _SIGMOID, "sigmoid")
    return {
        "score": "sigmoid",
        "select_bias": True,
        "num_groups": settings.count("n_group", 1),
        "top_groups": settings.count("topk_group", 1),
    }


def layers(settings: Settings) -> list[LayerSpec]:
    deepseek_v2.check_value(settings, "rope_interleave", True)
    return deepseek_v2.layers_with_experts(
        settings,
        deepseek_v2.latent_attention(settings),
        settings.renormalizes(in_gguf=False),
        **routing(settings),
    )


FAMILY = Family(
    name="deepseek_v3",
    layers=layers,
    model_types=("deepseek_v3",),
    # Its files say deepseek2: see `registry`.
    gguf_architectures=("deepseek3",),
    defaults={"q_lora_rank": 1536, "norm_topk_prob": True},
    tensors={**deepseek_v2.TENSORS, **EXPERT_TENSORS},
    rope_pairs=("huggingface", "gguf"),
    has_nextn=True,
    ignored_keys=deepseek_v2.IGNORED_KEYS,
)
