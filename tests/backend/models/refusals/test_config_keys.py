"""A setting that no family's code has read is refused, unless it is known to change nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import tiny
import tiny_gguf
from inflight.checkpoint.checked_fields import CheckedFields
from inflight.checkpoint.locate import Checkpoint
from inflight.errors import ConfigError
from inflight.models.refusals.config_keys import check_keys
from inflight.models.registry import all_families, read_spec

MODEL_TYPES = sorted({name for family in all_families().values() for name in family.model_types})

OF_FILES = {"glm4_moe": {"head_dim": 128}, "deepseek_v2": {"num_experts_per_tok": 6}}
"""Settings of published files whose defaults make no model: half of 42 columns is odd, and None is
no number of experts."""


def read(folder: Path, settings: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(settings))
    read_spec(Checkpoint(folder, "huggingface"))


def refusal(folder: Path, **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(folder, tiny.SETTINGS | settings)
    return str(caught.value)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_what_transformers_writes_is_known(tmp_path: Path, model_type: str) -> None:
    read(tmp_path, CONFIG_MAPPING[model_type]().to_dict() | OF_FILES.get(model_type, {}))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"attn_logit_softcapping": 50.0}, "50.0 caps the scores of attention, which is not"),
        ({"logit_scale": 0.25}, "0.25 scales the logits, which is not supported for the family"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "gives layers different"),
        ({"sliding_window": 64}, "limits attention to a window"),
        ({"num_local_experts": 8}, "makes a mixture of experts"),
        ({"rope_thetta": 5.0}, "rope_thetta: 5.0: not known for the family llama"),
        ({"rope_thetta": 5.0}, "did you mean 'rope_theta'?"),
        ({"a": 1, "b": [2], "c": {"d": 3}, "e": "f"}, "a: 1, b: [2], c: {'d': 3} and 1 more"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "trunkate": 1}},
            "rope_scaling.trunkate: 1 is unknown",
        ),
    ],
)
def test_a_setting_that_nothing_reads_is_refused(
    tmp_path: Path, settings: dict[str, Any], text: str
) -> None:
    found = refusal(tmp_path, **settings)
    assert text in found
    assert found.startswith(str(tmp_path / "config.json"))


@pytest.mark.parametrize(
    "settings",
    [
        # SmolLM2's, Phi 4's, Qwen 2.5's and those of fine-tuning tools.
        {"rope_interleaved": False, "is_llama_config": True, "transformers.js_config": {"a": 1}},
        {"embd_pdrop": 0.1, "full_attn_mod": 1, "interpolate_factor": 1, "unsloth_version": "1"},
        {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 4096},
        {"layer_types": ["full_attention"] * 2, "no_rope_layers": [1, 1], "max_window_layers": 8},
        {"rope_local_base_freq": 10000.0},
        {"num_experts": 0, "attn_logit_softcapping": None, "logit_scale": 1.0, "pad_id": 3},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_a_setting_that_changes_nothing_passes(tmp_path: Path, settings: dict[str, Any]) -> None:
    read(tmp_path, tiny.SETTINGS | settings)


def test_a_family_lists_further_settings_itself() -> None:
    family = all_families()["llama"]
    settings = {"scale_emb": 12}
    with pytest.raises(ConfigError, match="scale_emb: 12 scales the embedding"):
        check_keys(CheckedFields(settings, "x"), family)
    check_keys(CheckedFields(settings, "x"), replace(family, ignored_keys=frozenset(settings)))


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        ({"attention.clamp_kqv": 8.0}, "attention.clamp_kqv: 8.0 limits queries"),
        ({"pooling_type": 3}, "pooling_type: 3 makes a model for embeddings"),
        ({"unheard.of": [1, 2]}, "unheard.of: a list: not known"),
    ],
)
def test_metadata_of_a_gguf_file_is_checked_alike(
    tmp_path: Path, metadata: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_spec(tiny_gguf.write_gguf(tmp_path / "x.gguf", metadata=metadata))
    assert text in str(caught.value)
