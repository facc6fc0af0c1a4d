"""OLMo 2's and 3's logits are those of transformers, with windows that the texts outgrow."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import Olmo2Config, Olmo3Config

import family

YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 5e5,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}


class TestOlmo2(family.Suite):
    config = Olmo2Config
    variants: ClassVar = {"default": {}, "biased": {"attention_bias": True}}
    architecture = "olmo2"


class TestOlmo3(family.Suite):
    config = Olmo3Config
    variants: ClassVar = {
        "yarn": {
            "num_hidden_layers": 5,
            "sliding_window": family.WINDOW,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            },
        }
    }
    architecture = "olmo2"

    def metadata(self, config: Any) -> dict[str, Any]:
        return {
            "attention.sliding_window": config.sliding_window,
            "attention.sliding_window_pattern": [True, True, True, False, True],
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 8.0,
            "rope.scaling.original_context_length": 16,
        }
