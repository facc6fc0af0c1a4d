"""Granite's mixtures of experts have transformers' logits, with a shared expert and without."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import GraniteMoeConfig, GraniteMoeSharedConfig

import family

SCALED = {
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0625,
    "logits_scaling": 8.0,
    "head_dim": 16,
}


class TestGraniteMoe(family.Suite):
    config = GraniteMoeConfig
    variants: ClassVar = {"scaled": SCALED}
    architecture = "granitemoe"
    on_gpu = True

    def metadata(self, config: Any) -> dict[str, Any]:
        return {
            "attention.scale": float(config.attention_multiplier),
            "embedding_scale": float(config.embedding_multiplier),
            "residual_scale": float(config.residual_multiplier),
            "logit_scale": float(config.logits_scaling),
            "expert_count": config.num_local_experts,
            "expert_used_count": config.num_experts_per_tok,
        }


class TestGraniteMoeShared(TestGraniteMoe):
    config = GraniteMoeSharedConfig
    variants: ClassVar = {
        "scaled": SCALED | {"shared_intermediate_size": 32},
        "biased": SCALED | {"shared_intermediate_size": 96, "attention_bias": True},
    }

    def metadata(self, config: Any) -> dict[str, Any]:
        shared = {"expert_shared_feed_forward_length": config.shared_intermediate_size}
        return super().metadata(config) | shared
