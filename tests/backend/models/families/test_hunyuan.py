"""Hunyuan's logits are those of transformers."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import HunYuanDenseV1Config

import family

ALPHA = {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 1e4}


class TestHunYuan(family.Suite):
    config = HunYuanDenseV1Config
    variants: ClassVar = {
        "default": {},
        "alpha": {"rope_parameters": ALPHA},
        "biased": {"attention_bias": True},
    }
    architecture = "hunyuan-dense"
    on_gpu = False

    def metadata(self, config: Any) -> dict[str, Any]:
        if "alpha" not in config.rope_parameters:
            return {}
        dim = config.head_dim
        return {"rope.freq_base": 1e4 * 1000.0 ** (dim / (dim - 2)), "rope.scaling.type": "none"}
