"""DeepSeek V2's logits are those of transformers, in folders and GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from transformers import DeepseekV2Config

import family
import latents
from inflight.errors import ConfigError
from inflight.models.gpu_support import gpu_obstacle
from inflight.models.registry import read_spec
from inflight.models.spec import LatentSpec


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
    on_gpu = True

    def metadata(self, config: Any) -> dict[str, Any]:
        return latents.metadata(config)


def test_layers_have_the_sizes_that_the_settings_name(tmp_path: Path) -> None:
    suite = TestDeepseekV2()
    spec = read_spec(family.write_folder(suite.make(suite.variants["lite"]), tmp_path))
    attention = spec.layers[0].attention
    assert attention.latent == LatentSpec(0, rank=64, nope_dim=32, rope_dim=16, v_dim=24)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (4, 1, 80)
    assert attention.scale == pytest.approx(48**-0.5 * (0.1 * 0.707 * np.log(8) + 1) ** 2)
    (group,) = spec.kv_layout("float32").groups
    assert (group.k_dim, group.v_dim, group.shared_dim) == (80, 0, 64)
    assert gpu_obstacle(spec) == (
        "latent attention with 64 + 16 columns (allowed: 512 + 64) is not supported on GPUs"
    )


def test_older_gguf_files_have_keys_and_values_of_latents_in_one_tensor(tmp_path: Path) -> None:
    """With the lengths of the expanded ones, as many KV heads, and no gating function."""
    suite = TestDeepseekV2()
    model = suite.make(suite.variants["lite"])
    older = {
        "attention.head_count_kv": 4,
        "attention.key_length": 48,
        "attention.value_length": 24,
        "attention.key_length_mla": None,
        "attention.value_length_mla": None,
        "expert_gating_func": None,
    }
    metadata = {
        key: value
        for key, value in (latents.metadata(model.config) | older).items()
        if value is not None
    }
    checkpoint = family.write_gguf(model, tmp_path / "x.gguf", "deepseek2", **metadata)
    assert read_spec(checkpoint).family == "deepseek_v2"
    family.check(checkpoint, model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_topk_prob": True}, "norm_topk_prob: True; allowed: False"),
        ({"scoring_func": "sigmoid"}, "scoring_func: 'sigmoid'; allowed: softmax"),
        ({"topk_method": "noaux_tc"}, "topk_method: 'noaux_tc'; allowed: greedy, group_limited"),
        ({"kv_lora_rank": None}, "kv_lora_rank: None; allowed: an integer"),
        ({"v_head_dim": 0}, "v_head_dim: 0; allowed: an integer"),
        ({"n_group": 3, "topk_method": "group_limited_greedy"}, "of 3 groups of 8 experts"),
    ],
)
def test_what_would_change_the_outputs_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    checkpoint = _folder(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ConfigError, match=message):
        read_spec(checkpoint)


def test_groups_do_not_matter_to_a_greedy_choice(tmp_path: Path) -> None:
    checkpoint = _folder(tmp_path)
    spec = read_spec(checkpoint)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"n_group": 4, "topk_group": 2}))
    assert read_spec(checkpoint) == spec


def test_keys_of_a_gguf_file_are_longer_than_what_rope_rotates(tmp_path: Path) -> None:
    suite = TestDeepseekV2()
    model = suite.make(suite.variants["default"])
    metadata = latents.metadata(model.config) | {"attention.key_length_mla": 16}
    checkpoint = family.write_gguf(model, tmp_path / "x.gguf", "deepseek2", **metadata)
    with pytest.raises(ConfigError, match="key_length_mla: 16; allowed: more than the 16 columns"):
        read_spec(checkpoint)


def _folder(path: Path) -> family.Checkpoint:
    suite = TestDeepseekV2()
    return family.write_folder(suite.make(suite.variants["default"]), path)
