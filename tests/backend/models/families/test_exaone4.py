"""EXAONE 4's logits are those of transformers, with windows that its texts outgrow."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import Exaone4Config

import family


class TestExaone4(family.Suite):
    config = Exaone4Config
    variants: ClassVar = {
        "window": {"num_hidden_layers": 5, "sliding_window": family.WINDOW},
        "no window": {"sliding_window": None, "layer_types": ["full_attention"] * 4},
    }
    architecture = "exaone4"

    def metadata(self, config: Any) -> dict[str, Any]:
        if not config.sliding_window:
            return {}
        return {
            "attention.sliding_window": config.sliding_window,
            "attention.sliding_window_pattern": [True, True, True, False, True],
        }
