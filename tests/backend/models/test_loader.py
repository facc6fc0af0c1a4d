"""Weights arrive in one canonical form, whatever the format and the family."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Glm4Config, Qwen3Config, Qwen3MoeConfig

import family
import tiny
from inflight.checkpoint.locate import Checkpoint
from inflight.config import Quantization
from inflight.models import loader, registry
from inflight.models.layers.linear import CpuWeight
from inflight.models.linear.quantized import CpuQuantizedLinear
from inflight.models.linear.unquantized import CpuLinear
from inflight.models.loader import CpuPlacement, linear_names, load_weights
from inflight.models.quantization.choice import CpuFormat
from inflight.models.quantization.matrix import (
    DTYPES,
    Matrix,
    QuantizedMatrix,
    dequantized,
    quantize,
)
from inflight.models.quantization.writer import quantize_folder
from inflight.models.registry import family_of, read_spec
from paged_decoder import Paged, blocks_for, load

PROMPT = [5, 17, 99, 3, 150, 42]


@pytest.fixture
def zero_centered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama, as if its checkpoints stored the weights of norms minus one."""
    family = dataclasses.replace(
        registry.all_families()["llama"], zero_centered_norms=("huggingface",)
    )
    monkeypatch.setitem(registry.all_families(), "llama", family)


def norms_of(weights: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in weights if name.endswith("norm.weight")]


def test_norms_are_float32_and_other_weights_are_not(tmp_path: Path) -> None:
    checkpoint = tiny.write_llama(tmp_path)
    weights = load_weights(
        checkpoint, read_spec(checkpoint), CpuPlacement(torch.bfloat16), lambda *_: None
    )
    layer = weights.layers[0]
    assert layer.attention_norm is not None and layer.mlp_norm is not None
    norms = (weights.norm, layer.attention_norm, layer.mlp_norm)
    assert {norm.weight.dtype for norm in norms} == {torch.float32}
    product = layer.qkv(torch.zeros(1, 64, dtype=torch.bfloat16))
    assert weights.embedding.table.dtype == product.dtype == torch.bfloat16


@pytest.mark.usefixtures("zero_centered")
def test_one_is_added_in_float32(tmp_path: Path) -> None:
    """bfloat16 has no 1 + 2**-10."""
    stored = tiny.random_weights(tiny.SETTINGS)
    for name in norms_of(stored):
        stored[name] = torch.full_like(stored[name], 2.0**-10)
    checkpoint = tiny.write_llama(tmp_path, stored, dtype=torch.bfloat16)
    spec = read_spec(checkpoint)
    assert family_of(spec).zero_centered_norms
    weights = load_weights(checkpoint, spec, CpuPlacement(torch.bfloat16), lambda *_: None)
    found = [weights.norm]
    for layer in weights.layers:
        found += [norm for norm in (layer.attention_norm, layer.mlp_norm) if norm is not None]
    assert len(found) == len(norms_of(stored))
    for norm in found:
        assert torch.equal(norm.weight, torch.full_like(norm.weight, 1 + 2.0**-10))


def test_logits_are_those_of_weights_that_are_stored_whole(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    whole = tiny.random_weights(tiny.SETTINGS)
    names = norms_of(whole)
    assert len(names) == 1 + 2 * tiny.SETTINGS["num_hidden_layers"]
    centered = whole | {name: whole[name] - 1 for name in names}
    step = (PROMPT, 0, len(PROMPT), blocks_for(len(PROMPT)))
    (expected,) = Paged(load(tiny.write_llama(tmp_path / "whole", whole))).run(step)
    request.getfixturevalue("zero_centered")
    (logits,) = Paged(load(tiny.write_llama(tmp_path / "centered", centered))).run(step)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------- quantised weights


class RecordingPlacement(CpuPlacement):
    """Keeps the parts of linear layers with what becomes of them, and weights of output layers."""

    def __init__(self) -> None:
        super().__init__(torch.float32)
        self.layers: list[tuple[Sequence[Matrix], CpuWeight]] = []
        self.heads: list[Tensor] = []

    def linear(self, weights: Sequence[Matrix], biases: Sequence[Tensor]) -> CpuWeight:
        layer = super().linear(weights, biases)
        self.layers.append((weights, layer))
        return layer

    def head(self, stored: Matrix) -> CpuWeight:
        self.heads.append(dequantized(stored))
        return super().head(stored)


def placed(folder: Path) -> RecordingPlacement:
    placement, checkpoint = RecordingPlacement(), Checkpoint(folder, "huggingface")
    load_weights(checkpoint, read_spec(checkpoint), placement, lambda *_: None)
    return placement


def rows(values: Tensor, scales: Tensor) -> list[tuple[bytes, float]]:
    """Each row of a matrix, bit for bit, with its scale."""
    stored = values.contiguous().view(torch.uint8).numpy()
    return [
        (row.tobytes(), scale) for row, scale in zip(stored, scales.flatten().tolist(), strict=True)
    ]


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_stored_rows_are_placed_bit_for_bit_in_the_order_of_rope(tmp_path: Path, kind: str) -> None:
    """GLM-4 stores gate | up as one, and rotates adjacent columns of q and k together."""
    model = family.make(Glm4Config(**family.SHAPE, pad_token_id=0, attention_bias=True))
    names = linear_names(read_spec(family.write_folder(model, tmp_path / "in")))
    quantize_folder(tmp_path / "in", tmp_path / "out", names, kind)
    stored = load_file(tmp_path / "out/model.safetensors")
    expected = {name: rows(stored[name], stored[f"{name}_scale"]) for name in names}
    found = [
        rows(part.values, part.scales)
        for parts, _ in placed(tmp_path / "out").layers
        for part in parts
        if isinstance(part, QuantizedMatrix)
    ]
    assert sorted(chain(*found)) == sorted(chain(*expected.values()))
    attention = "model.layers.0.self_attn"
    assert expected[f"{attention}.v_proj.weight"] in found
    assert expected[f"{attention}.q_proj.weight"] not in found
    assert sorted(expected[f"{attention}.q_proj.weight"]) in map(sorted, found)


def test_parts_that_differ_in_format_are_dequantised_as_is_an_output_layer(tmp_path: Path) -> None:
    model = family.make(Qwen3Config(**family.SHAPE))
    names = linear_names(read_spec(family.write_folder(model, tmp_path / "in")))
    plain = "model.layers.1.self_attn.k_proj.weight"
    quantize_folder(tmp_path / "in", tmp_path / "out", {*names, "lm_head.weight"} - {plain}, "fp8")
    placement = placed(tmp_path / "out")
    unquantised = [parts for parts, layer in placement.layers if isinstance(layer, CpuLinear)]
    assert len(placement.layers) == 4 * 4 and len(unquantised) == 1
    q, k, v = unquantised[0]
    assert isinstance(q, QuantizedMatrix) and isinstance(v, QuantizedMatrix)
    before = load_file(tmp_path / "in/model.safetensors")
    assert isinstance(k, Tensor) and torch.equal(k, before[plain])
    (head,) = placement.heads
    assert torch.equal(head, quantize(before["lm_head.weight"], DTYPES["fp8"]).dequantized())


@pytest.mark.parametrize("kind", ["fp8", "int8", "int8_hadamard"])
def test_dense_layers_are_spread_but_no_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Quantization
) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    config = Qwen3MoeConfig(**family.SHAPE | sizes, mlp_only_layers=[0], pad_token_id=0)
    checkpoint = family.write_folder(family.make(config), tmp_path)
    found: dict[tuple[int, ...], set[int]] = {}

    def record(weight: QuantizedMatrix, bias: Tensor | None) -> CpuQuantizedLinear:
        found.setdefault(tuple(weight.shape), set()).add(weight.spread)
        return CpuQuantizedLinear(weight, bias)

    monkeypatch.setattr(loader, "CpuQuantizedLinear", record)
    placement = CpuPlacement(torch.float32, CpuFormat(kind, keeps_groups=False))
    load_weights(checkpoint, read_spec(checkpoint), placement, lambda *_: None)
    dense = {(256, 64): 64, (64, 128): 64, (192, 64): 64, (64, 96): 32}  # qkv, out, gate | up, down
    experts = {(96, 64): 0, (64, 48): 0}
    expected = experts | (dense if kind == "int8_hadamard" else dict.fromkeys(dense, 0))
    assert found == {shape: {spread} for shape, spread in expected.items()}


def test_rows_of_a_spread_matrix_keep_their_block_in_another_order() -> None:
    matrix = quantize(torch.randn(8, 32), torch.int8, 32)
    order = torch.tensor([2, 0, 3, 1])
    found = loader._in_order(matrix, order)
    exact = matrix.dequantized().view(2, 4, 32).index_select(1, order).view(8, 32)
    assert found.spread == 32 and torch.equal(found.dequantized(), exact)
