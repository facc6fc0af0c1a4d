"""GLM-4.7 Flash's logits are those of transformers, in folders and GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
from transformers import Glm4MoeLiteConfig

import family
import family_nextn
import latents
from inflight.errors import ConfigError
from inflight.models.registry import read_spec
from inflight.models.spec import MoeSpec

EXPERTS = {key: value for key, value in latents.EXPERTS.items() if key != "first_k_dense_replace"}
SETTINGS = latents.SHAPE | EXPERTS | {"num_nextn_predict_layers": 0}
MIXED = {"mlp_layer_types": ["dense", "sparse", "dense", "sparse"]}


class TestGlm4MoeLite(family_nextn.Suite):
    config = Glm4MoeLiteConfig
    variants: ClassVar = {
        "default": SETTINGS,
        "groups": SETTINGS | {"n_group": 4, "topk_group": 2, "norm_topk_prob": False},
    }
    architecture = "deepseek2"
    on_gpu = True

    def metadata(self, config: Any) -> dict[str, Any]:
        config.first_k_dense_replace = config.mlp_layer_types.count("dense")
        return latents.metadata(config) | {
            "expert_gating_func": 2,
            "expert_weights_norm": config.norm_topk_prob or None,
        }


def test_layers_with_experts_are_those_that_are_listed(tmp_path: Path) -> None:
    suite = TestGlm4MoeLite()
    model = suite.make(SETTINGS | MIXED)
    checkpoint = family.write_folder(model, tmp_path)
    found = [isinstance(layer.mlp, MoeSpec) for layer in read_spec(checkpoint).layers]
    assert found == [False, True, False, True]
    family.check(checkpoint, model)


@pytest.mark.parametrize("listed", ["sparse", ["sparse"] * 3, ["sparse"] * 3 + ["other"]])
def test_other_lists_are_refused(tmp_path: Path, listed: Any) -> None:
    suite = TestGlm4MoeLite()
    checkpoint = family.write_folder(suite.make(SETTINGS), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mlp_layer_types": listed}))
    with pytest.raises(ConfigError, match=r"mlp_layer_types: .*; allowed: dense or sparse for"):
        read_spec(checkpoint)


def test_without_a_list_the_first_layer_is_dense(tmp_path: Path) -> None:
    """As in the published files."""
    suite = TestGlm4MoeLite()
    checkpoint = family.write_folder(suite.make(SETTINGS), tmp_path)
    spec, path = read_spec(checkpoint), tmp_path / "config.json"
    settings = json.loads(path.read_text())
    del settings["mlp_layer_types"]
    path.write_text(json.dumps(settings | {"topk_method": "noaux_tc"}))
    assert read_spec(checkpoint) == spec
