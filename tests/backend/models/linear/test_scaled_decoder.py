"""The decoder of GPUs with linear layers of 8 bits, on the kernels' definitions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma3TextConfig, Glm4Config, LlamaConfig, Phi3Config

import family
import family_gpu
import host_linear
import mixed_step
import quantized_models
from inflight.checkpoint.locate import Checkpoint
from inflight.config import Quantization
from inflight.models import decoder_cuda
from inflight.models.decoder_cuda import Decoder
from inflight.models.loader import linear_names
from inflight.models.quantization.writer import quantize_folder
from inflight.models.registry import read_spec

SHAPE = family.SHAPE | {"pad_token_id": 0}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SHAPE),
    "phi3, fused": Phi3Config(**SHAPE | {"head_dim": 16}),
    "glm4, norms after layers": Glm4Config(**SHAPE, attention_bias=True),
    "gemma3, tied": Gemma3TextConfig(
        **SHAPE | {"tie_word_embeddings": True}, query_pre_attn_scalar=16
    ),
}


@pytest.fixture(autouse=True)
def _definitions(monkeypatch: pytest.MonkeyPatch) -> None:
    family_gpu.install(monkeypatch)


def decoder(checkpoint: Checkpoint, **settings: Any) -> Decoder:
    return mixed_step.make_model(checkpoint, torch.float32, torch.device("cpu"), **settings)


def logits(ours: Decoder) -> Tensor:
    """Of the texts without a history of noise."""
    found, _ = mixed_step.run(ours, mixed_step.EVERY_ROW)
    return found[: sum(len(text) for text in family_gpu.TEXTS)]


def reference(model: Any) -> Tensor:
    return torch.cat([family.reference_logits(model, text) for text in family_gpu.TEXTS])


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
def test_logits_equal_those_of_transformers_with_rounded_values(
    tmp_path: Path, config: Any, kind: Quantization
) -> None:
    model = family.make(config, deviation=0.05)
    source, written = tmp_path / "in", tmp_path / "out"
    checkpoint = family.write_folder(model, source)
    names = linear_names(read_spec(checkpoint))
    quantize_folder(source, written, names, kind)
    quantized = Checkpoint(written, "huggingface")
    weights_only, expected = quantized_models.rounded_logits(model, names, kind, reference)

    found = logits(decoder(quantized))
    errors = (found - expected).norm(dim=1)
    # A value half way between two may be rounded the other way, which the tokens after it see.
    assert errors.median() < 1e-3, errors
    assert errors.norm() < 0.4 * (weights_only - expected).norm(), errors
    assert torch.equal(logits(decoder(checkpoint, quantization=kind)), found)
    exact = logits(decoder(quantized, quantization="none"))
    torch.testing.assert_close(exact, weights_only, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_other_gpus_quantise_weights_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Quantization
) -> None:
    source, written = tmp_path / "in", tmp_path / "out"
    model = family.make(CONFIGS["llama"], deviation=0.05)
    names = linear_names(read_spec(family.write_folder(model, source)))
    quantize_folder(source, written, names, kind)
    quantized = Checkpoint(written, "huggingface")
    monkeypatch.setattr(decoder_cuda, "is_hopper", lambda: False)
    exact = decoder(quantized, quantization="none")
    for ours in (
        decoder(quantized),
        decoder(quantized, quantization=kind),
        decoder(Checkpoint(source, "huggingface"), quantization=kind),
    ):
        layer = ours.weights.layers[0]
        assert isinstance(layer.dense_mlp.down, host_linear.HostWeightOnlyLinear)
        assert torch.equal(logits(ours), logits(exact))
    assert type(exact.weights.layers[0].dense_mlp.down) is host_linear.HostLinear


@pytest.mark.parametrize("hopper", [True, False])
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_formats_for_activations_of_16_bits_keep_their_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, hopper: bool
) -> None:
    source, written = tmp_path / "in", tmp_path / "out"
    model = family.make(CONFIGS["phi3, fused"], deviation=0.05)
    names = linear_names(read_spec(family.write_folder(model, source)))
    quantize_folder(source, written, names, kind)
    quantized_models.keep_activations(written)
    quantized = Checkpoint(written, "huggingface")
    monkeypatch.setattr(decoder_cuda, "is_hopper", lambda: hopper)
    ours = decoder(quantized)
    for layer in ours.weights.layers:
        for one in (layer.qkv, layer.out, layer.dense_mlp.gate_up, layer.dense_mlp.down):
            assert isinstance(one, host_linear.HostWeightOnlyLinear)
    assert torch.equal(logits(ours), logits(decoder(quantized, quantization="none")))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
def test_logits_equal_those_with_values_that_are_rounded_transformed(
    tmp_path: Path, config: Any
) -> None:
    model = family.make(config, deviation=0.05)
    checkpoint = family.write_folder(model, tmp_path)
    names, kind = linear_names(read_spec(checkpoint)), "int8_hadamard"
    weights_only, expected = quantized_models.rounded_logits(model, names, kind, reference)
    errors = (logits(decoder(checkpoint, quantization=kind)) - expected).norm(dim=1)
    assert errors.median() < 1e-3, errors
    assert errors.norm() < 0.4 * (weights_only - expected).norm(), errors


@pytest.mark.parametrize("kind", ["fp8", "int8", "int8_hadamard"])
def test_weights_and_inputs_are_spread_alike(tmp_path: Path, kind: Quantization) -> None:
    checkpoint = family.write_folder(family.make(CONFIGS["llama"], deviation=0.05), tmp_path)
    ours = decoder(checkpoint, quantization=kind)
    expected = [64, 64, 64, 32] if kind == "int8_hadamard" else [0, 0, 0, 0]
    for layer in ours.weights.layers:
        mlp, found = layer.dense_mlp, []
        for one in (layer.qkv, layer.out, mlp.gate_up, mlp.down):
            assert isinstance(one, host_linear.HostScaledLinear)
            found.append(one.weight.spread)
            assert one.input_rows(1).spread == one.weight.spread
        assert found == expected
