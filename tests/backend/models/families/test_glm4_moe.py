"""GLM-4.5's logits are those of transformers, in folders and GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from transformers import Glm4MoeConfig

import family
import family_nextn
from inflight.errors import ConfigError
from inflight.models.registry import read_spec

EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
    "attention_bias": True,
    "use_qk_norm": True,
    "num_nextn_predict_layers": 0,
}


class TestGlm4Moe(family_nextn.Suite):
    config = Glm4MoeConfig
    variants: ClassVar = {
        "default": EXPERTS,
        "plain": EXPERTS | {"attention_bias": False, "use_qk_norm": False, "norm_topk_prob": False},
        "groups": EXPERTS | {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 0},
    }
    architecture = "glm4moe"
    on_gpu = True

    def metadata(self, config: Any) -> dict[str, Any]:
        return {
            "rope.dimension_count": config.head_dim // 2,
            "expert_count": config.n_routed_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_shared_count": config.n_shared_experts,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_group_count": config.n_group,
            "expert_group_used_count": config.topk_group,
            "expert_gating_func": 2,
            "expert_weights_scale": float(config.routed_scaling_factor),
            "expert_weights_norm": config.norm_topk_prob,
            "leading_dense_block_count": config.first_k_dense_replace,
        }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_group": 3}, "1 of 3 groups of 8 experts; allowed: groups of equal size"),
        ({"n_group": 4, "topk_group": 1}, "1 of 4 groups of 8 experts; .* that 3 experts can be"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok: 9; allowed: up to"),
    ],
)
def test_groups_that_cannot_be_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    config = Glm4MoeConfig(**{"pad_token_id": 0, **family.SHAPE, **EXPERTS, **changes})
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=message):
        read_spec(family.Checkpoint(tmp_path, "huggingface"))


def test_another_gating_function_is_refused(tmp_path: Path) -> None:
    model = _model({})
    metadata = TestGlm4Moe().metadata(model.config) | {"expert_gating_func": 1}
    checkpoint = family.write_gguf(model, tmp_path / "x.gguf", "glm4moe", **metadata)
    with pytest.raises(ConfigError, match="expert_gating_func: 1; allowed: 2, sigmoid"):
        read_spec(checkpoint)


def _model(changes: dict[str, Any]) -> Any:
    return family.make(Glm4MoeConfig(**{"pad_token_id": 0, **family.SHAPE, **EXPERTS, **changes}))
