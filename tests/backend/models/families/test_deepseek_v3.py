"""DeepSeek V3's logits are those of transformers, in folders and GGUF files."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import DeepseekV3Config

import family
import latents

EXPERTS = latents.EXPERTS | {"num_nextn_predict_layers": 0, "n_group": 1, "topk_group": 1}


class TestDeepseekV3(family.Suite):
    config = DeepseekV3Config
    variants: ClassVar = {
        "default": latents.SHAPE | EXPERTS,
        "groups": latents.SHAPE
        | EXPERTS
        | {"n_group": 4, "topk_group": 2, "rope_parameters": latents.YARN},
        "plain": latents.SHAPE
        | EXPERTS
        | {"q_lora_rank": None, "norm_topk_prob": False, "first_k_dense_replace": 0},
    }
    architecture = "deepseek2"
    on_gpu = False

    def metadata(self, config: Any) -> dict[str, Any]:
        return latents.metadata(config) | {
            "expert_gating_func": 2,
            # Written if it is true.
            "expert_weights_norm": config.norm_topk_prob or None,
        }
