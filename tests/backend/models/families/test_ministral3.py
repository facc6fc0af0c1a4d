"""Ministral 3's logits are those of transformers, beyond the trained context."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import Ministral3Config

import family

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "max_position_embeddings": 256,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}


class TestMinistral3(family.Suite):
    config = Ministral3Config
    variants: ClassVar = {
        "scaled": {"rope_parameters": YARN},
        "window": {"rope_parameters": YARN, "sliding_window": family.WINDOW},
    }
    architecture = "mistral3"
    on_gpu = False

    def metadata(self, config: Any) -> dict[str, Any]:
        return {
            "attention.sliding_window": config.sliding_window,
            "attention.temperature_scale": 0.5,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 16.0,
            "rope.scaling.original_context_length": 16,
            "rope.scaling.yarn_log_multiplier": 1.0,
        }
