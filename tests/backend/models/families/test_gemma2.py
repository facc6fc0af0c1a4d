"""Gemma 2's logits are those of transformers, with windows that its texts outgrow."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import Gemma2Config

import family


class TestGemma2(family.Suite):
    config = Gemma2Config
    # Scores and logits are large enough that the caps change them.
    variants: ClassVar = {
        "capped": {
            "sliding_window": family.WINDOW,
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 2.0,
            "tie_word_embeddings": True,
        }
    }
    architecture = "gemma2"
    norm_mean = 0.0

    def metadata(self, config: Any) -> dict[str, Any]:
        return {
            "attention.sliding_window": config.sliding_window,
            "attn_logit_softcapping": config.attn_logit_softcapping,
            "final_logit_softcapping": config.final_logit_softcapping,
        }
