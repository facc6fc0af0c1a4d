"""Nemotron's logits are those of transformers."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import NemotronConfig

import family


class TestNemotron(family.Suite):
    config = NemotronConfig
    variants: ClassVar = {
        "default": {"rms_norm_eps": family.ABSENT},
        "biased": {"rms_norm_eps": family.ABSENT, "attention_bias": True, "mlp_bias": True},
    }
    architecture = "nemotron"
    norm_mean = 0.0

    def metadata(self, config: Any) -> dict[str, Any]:
        return {"rope.dimension_count": config.head_dim // 2}
