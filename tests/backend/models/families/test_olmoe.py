"""OLMoE's logits are those of transformers, in folders and GGUF files."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import OlmoeConfig

import family

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3}


class TestOlmoe(family.Suite):
    config = OlmoeConfig
    variants: ClassVar = {
        "default": EXPERTS | {"head_dim": 16},
        "biased": EXPERTS | {"head_dim": 16, "attention_bias": True, "norm_topk_prob": True},
    }
    architecture = "olmoe"
    on_gpu = True
    # A rounded value can change which experts a router chooses: one token in these texts differs by
    # 0.09. In float32 all are equal.
    rounding_tolerance = 0.2

    def metadata(self, config: Any) -> dict[str, Any]:
        found = {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
        }
        # llama.cpp's converter writes no such key; without it, they are not normalised.
        return found | {"expert_weights_norm": True} if config.norm_topk_prob else found
