"""What is stored in groups, or rounded to 4 bits, stays in groups in the linear layers of CPUs, and
is dequantised to the same numbers where that is not possible."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor
from transformers import MixtralConfig, Qwen3MoeConfig

import family
import grouped_folders as folders
import quantized_models
import tiny_gguf
from family import relative_rms
from inflight.checkpoint.locate import Checkpoint
from inflight.config import Quantization
from inflight.models import decoder_cpu
from inflight.models.decoder_cpu import Decoder
from inflight.models.layers.linear import CpuWeight
from inflight.models.layers.weights import MlpWeights, MoeWeights
from inflight.models.linear.grouped_cpu import CpuGroupedLinear, CpuGroupedTable
from inflight.models.linear.quantized import CpuQuantizedLinear
from inflight.models.linear.unquantized import CpuLinear, CpuTable
from inflight.models.loader import CpuPlacement, linear_names
from inflight.models.quantization.choice import CpuFormat
from inflight.models.quantization.grouped import GroupedMatrix
from inflight.models.quantization.rounding import quantize_groups
from inflight.models.quantization.writer import quantize_folder
from inflight.models.registry import read_spec
from kept_groups import KEPT_TOLERANCE

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# Tokens have all experts, so that no choice changes where activations are rounded.
MOE = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 32}


def decoder(checkpoint: Checkpoint, quantization: Quantization = "auto") -> Decoder:
    spec = read_spec(checkpoint)
    return Decoder(checkpoint, spec, torch.float32, 64, lambda *_: None, quantization)


def linear_layers(model: Decoder) -> list[CpuWeight]:
    found: list[CpuWeight] = []
    for layer in model.weights.layers:
        found += [layer.qkv, layer.out]
        if isinstance(layer.mlp, MlpWeights):
            found += [layer.mlp.gate_up, layer.mlp.down]
        else:
            found += [part for one in layer.mlp.experts for part in (one.gate_up, one.down)]
    return found


def kinds(model: Decoder) -> set[type[CpuWeight]]:
    return {type(layer) for layer in linear_layers(model)}


def logits(checkpoint: Checkpoint, quantization: Quantization = "auto") -> Tensor:
    texts = [family.tokens(seed=1), family.tokens(seed=2)]
    found = family.our_logits(checkpoint, texts, family.MIXED, quantization=quantization)
    return torch.cat(found)


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_cpu, "has_kernels", lambda: False)


def in_4_bits(folder: Path) -> Checkpoint:
    """With experts."""
    source = family.write_folder(family.make(Qwen3MoeConfig(**family.SHAPE | MOE)), folder / "in")
    quantize_folder(source.path, folder / "4", linear_names(read_spec(source)), "int4")
    return Checkpoint(folder / "4", "huggingface")


@pytest.mark.parametrize("setting", ["auto", "int4"])
def test_a_folder_stays_in_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: Quantization
) -> None:
    checkpoint = in_4_bits(tmp_path)
    model = decoder(checkpoint, setting)
    assert kinds(model) == {CpuGroupedLinear}
    assert isinstance(model.weights.embedding, CpuTable)
    assert isinstance(model.weights.head, CpuLinear)
    found, exact = logits(checkpoint, setting), logits(checkpoint, "none")
    assert 0 < relative_rms(found, exact) < KEPT_TOLERANCE
    assert kinds(decoder(checkpoint, "none")) == {CpuLinear}
    without_kernels(monkeypatch)
    assert kinds(decoder(checkpoint, setting)) == {CpuLinear}
    assert torch.equal(logits(checkpoint, setting), exact)


def test_weights_that_are_rounded_stay_in_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = family.make(Qwen3MoeConfig(**family.SHAPE | MOE))
    checkpoint = family.write_folder(model, tmp_path)
    ours, plain = decoder(checkpoint, "int4"), decoder(checkpoint)
    assert kinds(ours) == {CpuGroupedLinear} and kinds(plain) == {CpuLinear}
    for one, other in zip(ours.weights.layers, plain.weights.layers, strict=True):
        assert isinstance(one.mlp, MoeWeights) and isinstance(other.mlp, MoeWeights)
        assert torch.equal(one.mlp.router.to_dense(), other.mlp.router.to_dense())
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(ours.weights.head(x), plain.weights.head(x))
    token_ids = torch.arange(10)
    assert torch.equal(ours.weights.embedding(token_ids), plain.weights.embedding(token_ids))
    found = logits(checkpoint, "int4")
    assert relative_rms(found, logits(checkpoint)) > KEPT_TOLERANCE
    without_kernels(monkeypatch)
    assert kinds(decoder(checkpoint, "int4")) == {CpuLinear}
    assert 0 < relative_rms(found, logits(checkpoint, "int4")) < KEPT_TOLERANCE


@pytest.mark.parametrize("keeps_activations", [False, True])
def test_beside_groups_8_bits_have_their_own_products_or_none(
    tmp_path: Path, keeps_activations: bool
) -> None:
    """FP8 in attention, 4 bits in MLPs."""
    folders.write_mixed(tmp_path)
    if keeps_activations:  # for which CPUs have no products
        quantized_models.keep_activations(tmp_path)
    checkpoint = Checkpoint(tmp_path, "huggingface")
    expected = CpuLinear if keeps_activations else CpuQuantizedLinear
    for layer in decoder(checkpoint).weights.layers:
        assert isinstance(layer.mlp, MlpWeights)
        assert {type(layer.qkv), type(layer.out)} == {expected}
        assert {type(layer.mlp.gate_up), type(layer.mlp.down)} == {CpuGroupedLinear}
    assert kinds(decoder(checkpoint, "none")) == {CpuLinear}


def test_layers_of_which_a_part_is_in_no_groups_are_dequantised(tmp_path: Path) -> None:
    source = family.write_folder(folders.qwen3(), tmp_path / "in")
    names = {name for name in linear_names(read_spec(source)) if "q_proj" not in name}
    quantize_folder(source.path, tmp_path / "4", names, "int4")
    model = decoder(Checkpoint(tmp_path / "4", "huggingface"))
    for layer in model.weights.layers:
        assert isinstance(layer.qkv, CpuLinear) and isinstance(layer.out, CpuGroupedLinear)


@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q8_0, Kind.F32])
def test_int4_rounds_what_has_more_bits_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    checkpoint = tiny_gguf.write_gguf(tmp_path / "x.gguf", kind)
    model = decoder(checkpoint, "int4")
    assert kinds(model) == {CpuGroupedLinear}
    kept = CpuTable if kind == Kind.F32 else CpuGroupedTable
    assert isinstance(model.weights.embedding, kept)  # as it is stored
    found = logits(checkpoint, "int4")
    if kind == Kind.Q4_1:
        assert torch.equal(found, logits(checkpoint))
    else:
        assert relative_rms(found, logits(checkpoint)) > KEPT_TOLERANCE
    without_kernels(monkeypatch)
    assert kinds(decoder(checkpoint, "int4")) == {CpuLinear}
    assert relative_rms(found, logits(checkpoint, "int4")) < KEPT_TOLERANCE


def test_experts_of_a_file_are_rounded(tmp_path: Path) -> None:
    made = family.make(MixtralConfig(**{"pad_token_id": 0, **family.SHAPE, **EXPERTS}))
    metadata = {"expert_count": 4, "expert_used_count": 2}
    path = tmp_path / "x.gguf"
    checkpoint = family.write_gguf(made, path, "llama", Kind.Q8_0, **metadata)
    assert kinds(decoder(checkpoint, "int4")) == {CpuGroupedLinear}


def test_8_bits_of_whole_tokens_keep_no_groups(tmp_path: Path) -> None:
    checkpoint = tiny_gguf.write_gguf(tmp_path / "x.gguf", Kind.Q8_0)
    model = decoder(checkpoint, "int8")
    assert kinds(model) == {CpuQuantizedLinear}
    assert isinstance(model.weights.embedding, CpuTable)


@pytest.mark.parametrize(("group", "kind"), [(20, CpuLinear), (24, CpuGroupedLinear)])
def test_groups_that_kernels_do_not_take_are_dequantised(group: int, kind: type[CpuWeight]) -> None:
    codes = folders.drawn_codes(32, 120, 4).to(torch.uint8)
    matrix = GroupedMatrix(codes, 4, folders.drawn_scales(32, 120 // group).float(), zero=8)
    layer = CpuPlacement(torch.float32).linear([matrix], [])
    assert type(layer) is kind
    x = torch.randn(5, 120, generator=torch.Generator().manual_seed(0))
    assert relative_rms(layer(x), x @ matrix.dequantized().T) < KEPT_TOLERANCE


def test_widths_without_groups_are_not_rounded() -> None:
    weight = torch.randn(32, 80, generator=torch.Generator().manual_seed(0))
    layer = CpuPlacement(torch.float32, CpuFormat("int4")).linear([weight], [])
    x = torch.randn(3, 80, generator=torch.Generator().manual_seed(1))
    assert isinstance(layer, CpuLinear)
    torch.testing.assert_close(layer(x), x @ weight.T)


def test_parts_that_are_rounded_lie_beside_those_that_are_stored() -> None:
    random = torch.Generator().manual_seed(0)
    plain, stored = torch.randn(2, 32, 64, generator=random)
    matrix = quantize_groups(stored, 32)
    layer = CpuPlacement(torch.float32, CpuFormat("int4")).linear([plain, matrix], [])
    assert isinstance(layer, CpuGroupedLinear)
    x = torch.randn(3, 64, generator=random)
    expected = torch.cat([quantize_groups(plain, 64).dequantized(), matrix.dequantized()])
    assert relative_rms(layer(x), x @ expected.T) < KEPT_TOLERANCE
