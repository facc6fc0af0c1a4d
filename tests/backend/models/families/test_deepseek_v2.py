"""DeepSeek V2's logits are those of transformers, in folders and GGUF files."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import DeepseekV2Config

import family
import latents


class TestDeepseekV2(family.Suite):
    config = DeepseekV2Config
    variants: ClassVar = {
        "default": latents.SHAPE | latents.EXPERTS,
        "lite": latents.SHAPE
        | latents.EXPERTS
        | {"q_lora_rank": None, "rope_parameters": latents.YARN},
        "groups": latents.SHAPE
        | latents.EXPERTS
        | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    }
    architecture = "deepseek2"
    on_gpu = False

    def metadata(self, config: Any) -> dict[str, Any]:
        return latents.metadata(config)
