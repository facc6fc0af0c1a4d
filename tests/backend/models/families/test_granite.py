"""Granite's logits are those of transformers."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import GraniteConfig

import family


class TestGranite(family.Suite):
    config = GraniteConfig
    variants: ClassVar = {
        "scaled": {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.0625,
            "logits_scaling": 8.0,
        },
        "biased": {"attention_bias": True, "mlp_bias": True, "attention_multiplier": 0.2},
    }
    architecture = "granite"

    def metadata(self, config: Any) -> dict[str, Any]:
        return {
            "attention.scale": float(config.attention_multiplier),
            "embedding_scale": float(config.embedding_multiplier),
            "residual_scale": float(config.residual_multiplier),
            "logit_scale": float(config.logits_scaling),
        }
