"""Cohere 2's logits are those of transformers, with windows that its texts outgrow."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import Cohere2Config

import family


class TestCohere2(family.Suite):
    config = Cohere2Config
    variants: ClassVar = {
        "tied": {
            "tie_word_embeddings": True,
            "rms_norm_eps": family.ABSENT,
            "num_hidden_layers": 5,
            "sliding_window": family.WINDOW,
        }
    }
    architecture = "cohere2"

    def metadata(self, config: Any) -> dict[str, Any]:
        return {
            "attention.sliding_window": config.sliding_window,
            "logit_scale": config.logit_scale,
        }
