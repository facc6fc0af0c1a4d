"""StarCoder2's logits are those of transformers, with windows that its texts outgrow."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import Starcoder2Config

import family

SHAPE = {"rms_norm_eps": family.ABSENT, "head_dim": family.ABSENT}


class TestStarcoder2(family.Suite):
    config = Starcoder2Config
    variants: ClassVar = {
        "tied": SHAPE | {"tie_word_embeddings": True, "sliding_window": family.WINDOW},
        "without biases": SHAPE | {"use_bias": False},
    }
    architecture = "starcoder2"

    def metadata(self, config: Any) -> dict[str, Any]:
        return {"attention.sliding_window": config.sliding_window}
