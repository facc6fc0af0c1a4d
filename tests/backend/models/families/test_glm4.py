"""GLM-4's logits are those of transformers."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import Glm4Config

import family


class TestGlm4(family.Suite):
    config = Glm4Config
    variants: ClassVar = {
        "biased": {},
        "plain": {"attention_bias": False},
    }
    architecture = "glm4"

    def metadata(self, config: Any) -> dict[str, Any]:
        return {"rope.dimension_count": config.head_dim // 2}
