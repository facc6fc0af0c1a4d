"""What is known and not supported is refused by name, with the nearest that works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest

import tiny_gguf
from inflight.checkpoint.checked_fields import CheckedFields
from inflight.checkpoint.gguf import GgufFile
from inflight.errors import ConfigError
from inflight.models.refusals.architectures import refuse_folder, refuse_gguf

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")


def refusal(**settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        refuse_folder(CheckedFields(settings, "config.json"), SUPPORTED)
    return str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "reason", "nearest"),
    [
        ("phimoe", "a mixture of experts", "llama"),
        ("grovemoe", "a mixture of experts", "qwen3"),
        ("exaone_moe", "a mixture of experts", "qwen3"),
        ("kimi_k2", "latent attention", "llama"),
        ("deepseek_v32", "sparse attention", "llama"),
        ("granitemoe_swa", "a mixture of experts", "llama"),
        ("jamba", "recurrent layers", "llama"),
        ("granitemoehybrid", "can be recurrent", "llama"),
        ("qwen3_next", "recurrent layers", "qwen3"),
        ("minicpm3", "latent attention", "llama"),
        ("qwen2_5_vl", "reads images", "qwen2"),
        ("bert", "an encoder", None),
        ("t5", "an encoder beside the decoder", None),
        ("llada", "by diffusion", None),
    ],
)
def test_a_refusal_says_what_it_is_and_what_comes_close(
    model_type: str, reason: str, nearest: str | None
) -> None:
    found = refusal(model_type=model_type)
    assert found.startswith(f"config.json: model_type: the architecture {model_type!r} is not ")
    assert reason in found
    assert ("use a model" in found) == (nearest is not None)
    assert nearest is None or f"use a model of the architecture {nearest!r}" in found
    assert found.endswith("allowed: llama, mistral, qwen2, qwen3")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            {"n_routed_experts": 64},
            "a mixture of experts of a kind that is not supported (n_r",
        ),
        ({"mamba_d_state": 128}, "(mamba_d_state)"),
        ({"vision_config": {"hidden_size": 8}}, "(vision_config)"),
        ({"is_encoder_decoder": True}, "(is_encoder_decoder)"),
    ],
)
def test_an_unlisted_architecture_is_told_by_its_settings(
    settings: dict[str, Any], reason: str
) -> None:
    assert reason in refusal(model_type="unheard_of", **settings)


def test_an_architecture_without_a_sign_is_left_to_the_registry() -> None:
    refuse_folder(CheckedFields({"model_type": "unheard_of", "num_experts": 0}, "x"), SUPPORTED)


def test_a_family_takes_precedence_over_the_table() -> None:
    refuse_folder(CheckedFields({"model_type": "phimoe"}, "x"), (*SUPPORTED, "phimoe"))


def test_a_wrapper_of_a_supported_text_model_is_told_what_to_do() -> None:
    found = refusal(model_type="mistral3", text_config={"model_type": "mistral"})
    assert "its text part alone is: use a GGUF file" in found
    assert "(model_type 'mistral')" in found


def test_a_wrapper_of_another_text_model_is_told_so() -> None:
    found = refusal(model_type="llama4", text_config={"model_type": "llama4_text"})
    assert "'llama4_text', is not supported either: it is a mixture of experts" in found


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("Qwen3ForSequenceClassification", "a classifier"),
        ("MistralModel", "for embeddings"),
        ("LlamaForMaskedLM", "an encoder"),
    ],
)
def test_a_model_without_an_output_layer_is_refused(name: str, what: str) -> None:
    found = refusal(model_type="llama", architectures=[name])
    assert f"architectures: {name} is" in found
    assert what in found and "allowed: ...ForCausalLM" in found


def test_architectures_are_a_list() -> None:
    assert "True; allowed: a list" in refusal(model_type="llama", architectures=True)


@pytest.mark.parametrize(
    ("architecture", "metadata", "text"),
    [
        ("grovemoe", {}, "use a model of the architecture 'qwen3'"),
        ("falcon-h1", {}, "recurrent layers"),
        ("unheard-of", {"expert_count": 8}, "a mixture of experts"),
    ],
)
def test_gguf_files_are_refused_alike(
    tmp_path: Path, architecture: str, metadata: dict[str, int], text: str
) -> None:
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConfigError) as caught:
        refuse_gguf(GgufFile(path), architecture, SUPPORTED)
    assert str(path) in str(caught.value) and text in str(caught.value)


def test_a_supported_file_passes(tmp_path: Path) -> None:
    refuse_gguf(GgufFile(tiny_gguf.write_gguf(tmp_path / "x.gguf").path), "llama", SUPPORTED)
