"""Cohere's logits are those of transformers."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import CohereConfig

import family


class TestCohere(family.Suite):
    config = CohereConfig
    variants: ClassVar = {
        "tied": {"tie_word_embeddings": True, "rms_norm_eps": family.ABSENT},
        "norm of q and k": {
            "tie_word_embeddings": True,
            "rms_norm_eps": family.ABSENT,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    }
    architecture = "command-r"
    on_gpu = False

    def metadata(self, config: Any) -> dict[str, Any]:
        return {"logit_scale": config.logit_scale}
