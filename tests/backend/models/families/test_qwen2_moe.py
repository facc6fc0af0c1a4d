"""Qwen 1.5 and 2's mixtures of experts have the logits of transformers."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import Qwen2MoeConfig

import family

EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 96,
}


class TestQwen2Moe(family.Suite):
    config = Qwen2MoeConfig
    variants: ClassVar = {
        "default": EXPERTS,
        "normalised": EXPERTS | {"norm_topk_prob": True, "qkv_bias": False},
        "window": EXPERTS
        | {"use_sliding_window": True, "sliding_window": family.WINDOW, "max_window_layers": 3},
    }
    architecture = "qwen2moe"
    on_gpu = True

    def metadata(self, config: Any) -> dict[str, Any]:
        found = {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        }
        if config.norm_topk_prob:
            found["expert_weights_norm"] = True
        if config.use_sliding_window:
            # As config.json says it; llama.cpp's converter writes no window.
            found |= {
                "use_sliding_window": True,
                "attention.sliding_window": config.sliding_window,
                "max_window_layers": config.max_window_layers,
            }
        return found
