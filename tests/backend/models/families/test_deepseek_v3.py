"""DeepSeek V3's logits are those of transformers, in folders and GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
from transformers import DeepseekV3Config

import experts
import family
import family_nextn
import latents
import quantized_models
from inflight.checkpoint.locate import Checkpoint
from inflight.errors import ConfigError
from inflight.models.loader import linear_names
from inflight.models.quantization.writer import quantize_folder
from inflight.models.registry import read_spec

EXPERTS = latents.EXPERTS | {"num_nextn_predict_layers": 0, "n_group": 1, "topk_group": 1}


class TestDeepseekV3(family_nextn.Suite):
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
    stands_for_others = True
    architecture = "deepseek2"
    on_gpu = True

    def metadata(self, config: Any) -> dict[str, Any]:
        return latents.metadata(config) | {
            "expert_gating_func": 2,
            # Written if it is true.
            "expert_weights_norm": config.norm_topk_prob or None,
        }


PUBLISHED: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
"""Of DeepSeek V3's config.json."""


def _published(folder: Path, **changes: Any) -> Checkpoint:
    (folder / "config.json").write_text(json.dumps(PUBLISHED | changes))
    return Checkpoint(folder, "huggingface")


def test_the_published_settings_are_read(tmp_path: Path) -> None:
    spec = read_spec(_published(tmp_path))
    assert 670e9 < spec.matrix_elements < 672e9
    assert spec.max_context == 163840
    attention = spec.layers[0].attention
    assert attention.head_dim == 576 and attention.rope_dim == 64
    assert attention.scale == pytest.approx(192**-0.5 * 1.3688879**2)
    assert spec.kv_layout("bfloat16").block_bytes(1) == 61 * 576 * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func: 'softmax'; allowed: sigmoid"),
        ({"topk_method": "greedy"}, "topk_method: 'greedy'; allowed: noaux_tc"),
        ({"rope_interleave": False}, "rope_interleave: False; allowed: True"),
        ({"attention_bias": True}, "attention_bias: True: not known for the family deepseek_v3"),
        ({"moe_layer_freq": 2}, "moe_layer_freq: 2: not known for the family deepseek_v3"),
        ({"qk_rope_head_dim": 63}, "head_dim: 63 is odd"),
    ],
)
def test_what_would_change_the_outputs_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_spec(_published(tmp_path, **changes))


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_weights_of_8_bits_are_those_of_linear_layers_alone(tmp_path: Path, kind: str) -> None:
    """Matrices that make keys and values of latents keep their bits."""
    suite = TestDeepseekV3()
    model = suite.make(suite.variants["default"])
    checkpoint = family.write_folder(model, tmp_path / "whole")
    names = linear_names(read_spec(checkpoint))
    assert sum(".kv_a_proj_with_mqa." in name for name in names) == 4
    assert not any(".kv_b_proj." in name for name in names)
    quantize_folder(tmp_path / "whole", tmp_path / "small", names, kind)
    quantized_models.keep_activations(tmp_path / "small")
    stacks = [name for name in model.state_dict() if experts.is_stack(name)]
    quantized_models.round_weights(model, [*names, *stacks], kind)
    family.check(Checkpoint(tmp_path / "small", "huggingface"), model)
