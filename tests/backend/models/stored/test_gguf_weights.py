"""Matrices of a GGUF file stay in their 4 to 8 bits, and have the values that they had."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import MixtralConfig

import family
import tiny
import tiny_gguf
from inflight.checkpoint.locate import Checkpoint
from inflight.models.cuda_placement import CudaPlacement
from inflight.models.families.granite_moe import FAMILY
from inflight.models.linear.unquantized_cuda import CudaLinear
from inflight.models.loader import linear_names, load_weights, weight_shapes
from inflight.models.quantization.grouped import GroupedMatrix
from inflight.models.quantization.matrix import dequantized, stored_kind
from inflight.models.registry import read_spec
from inflight.models.stored.gguf_weights import GgufWeights
from inflight.models.stored.weights import Weights, open_weights

JOINED = "model.layers.0.shared_mlp.input_linear.weight"


def open_all(checkpoint: Checkpoint, device: str = "cpu") -> Weights:
    spec = read_spec(checkpoint)
    return open_weights(checkpoint, spec, weight_shapes(spec), device)


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0])
def test_matrices_keep_their_bits_and_values(tmp_path: Path, kind: Kind) -> None:
    """Those of embeddings and of the output layer, too."""
    checkpoint = tiny_gguf.write_gguf(tmp_path / "x.gguf", kind)
    weights, known = open_all(checkpoint), open_all(checkpoint, "meta")
    kept = set()
    for name in weights.shapes:
        found = weights.read_matrix(name)
        assert torch.equal(dequantized(found), weights.read(name))
        assert stored_kind(known.read_matrix(name)) == stored_kind(found)
        if isinstance(found, GroupedMatrix):
            assert found.bits == int(kind.name[1])
            kept.add(name)
    outer = {"model.embed_tokens.weight", "lm_head.weight"}
    assert kept == linear_names(read_spec(checkpoint)) | outer


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16])
def test_wider_values_are_tensors(tmp_path: Path, kind: Kind) -> None:
    weights = open_all(tiny_gguf.write_gguf(tmp_path / "x.gguf", kind))
    for name in weights.shapes:
        found = weights.read_matrix(name)
        assert isinstance(found, torch.Tensor)
        assert torch.equal(found, weights.read(name))


def test_experts_keep_their_bits(tmp_path: Path) -> None:
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2}
    model = family.make(MixtralConfig(**{"pad_token_id": 0, **family.SHAPE, **sizes}))
    metadata = {"expert_count": 4, "expert_used_count": 2}
    checkpoint = family.write_gguf(model, tmp_path / "x.gguf", "llama", Kind.Q4_0, **metadata)
    weights, known = open_all(checkpoint), open_all(checkpoint, "meta")
    for name in linear_names(read_spec(checkpoint)):
        found = weights.read_matrix(name)
        assert isinstance(found, GroupedMatrix)
        assert torch.equal(found.dequantized(), weights.read(name))
        assert stored_kind(known.read_matrix(name)) == found.kind


def test_a_model_computes_what_it_did(tmp_path: Path) -> None:
    original = tiny.random_weights(tiny.SETTINGS)
    kept = tiny_gguf.rounded(original, Kind.Q4_0)
    texts = [
        tiny.generate(
            tiny.make_runner(checkpoint, quantization="none"),
            [tiny.make_sequence([5, 9, 77], list(range(12)))],
            30,
        )
        for checkpoint in (
            tiny.write_llama(tmp_path / "hf", kept),
            tiny_gguf.write_gguf(tmp_path / "x.gguf", Kind.Q4_0, original),
        )
    ]
    assert texts[0] == texts[1]


def test_a_model_has_its_shapes_on_the_meta_device(tmp_path: Path) -> None:
    """There the rows of q and k, which have codes, are not put in order."""
    checkpoint = tiny_gguf.write_gguf(tmp_path / "x.gguf", Kind.Q4_1)
    spec, meta = read_spec(checkpoint), torch.device("meta")
    placement = CudaPlacement(torch.bfloat16, meta, False)
    weights = load_weights(checkpoint, spec, placement, lambda what, done: None, meta)
    for layer in weights.layers:
        assert isinstance(layer.qkv, CudaLinear)
        assert layer.qkv.weight.is_meta
        assert layer.qkv.weight.shape == (spec.layers[0].attention.qkv_width, spec.hidden_size)


def joined(path: Path, gate: Kind, up: Kind) -> GgufWeights:
    """Gate [4, 256] above up [8, 256], which folders of the family have as one tensor."""
    tensors = {}
    for slot, kind, rows in (("gate", gate, 4), ("up", up, 8)):
        length, _ = gguf.GGML_QUANT_SIZES[kind]
        blocks = tiny_gguf.drawn_blocks(kind, rows * 256 // length, seed=rows)
        tensors[f"blk.0.ffn_{slot}_shexp.weight"] = kind, blocks.reshape(rows, -1)
    return GgufWeights(tiny_gguf.write_tensors(path, tensors), FAMILY)


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q6_K, Kind.IQ3_S])
def test_parts_of_one_kind_are_joined(tmp_path: Path, kind: Kind) -> None:
    weights = joined(tmp_path / "x.gguf", kind, kind)
    found = weights.read_matrix(JOINED)
    assert isinstance(found, GroupedMatrix)
    assert found.shape == weights.shapes[JOINED] == (12, 256)
    assert torch.equal(found.dequantized(), weights.read(JOINED))
    assert stored_kind(weights.shaped_matrix(JOINED)) == found.kind


def test_parts_of_two_kinds_are_dequantised(tmp_path: Path) -> None:
    weights = joined(tmp_path / "x.gguf", Kind.Q4_K, Kind.Q6_K)
    found = weights.read_matrix(JOINED)
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found, weights.read(JOINED))
    assert isinstance(weights.shaped_matrix(JOINED), torch.Tensor)


def test_types_of_one_kind_are_joined(tmp_path: Path) -> None:
    weights = joined(tmp_path / "x.gguf", Kind.IQ4_NL, Kind.IQ4_XS)
    found = weights.read_matrix(JOINED)
    assert isinstance(found, GroupedMatrix)
    assert torch.equal(found.dequantized(), weights.read(JOINED))


def test_a_scale_that_is_not_finite_leaves_a_tensor_as_it_was(tmp_path: Path) -> None:
    """The other tensors keep their bits."""
    blocks = tiny_gguf.drawn_blocks(Kind.Q8_0, 16)
    damaged = blocks.copy()
    damaged[3, :2] = np.array([np.inf], np.float16).view(np.uint8)
    tensors = {
        f"blk.0.ffn_{slot}.weight": (Kind.Q8_0, data.reshape(4, -1))
        for slot, data in (("up", blocks), ("down", damaged))
    }
    path = tiny_gguf.write_tensors(tmp_path / "x.gguf", tensors)
    weights = GgufWeights(path, FAMILY)
    for name in weights.shapes:
        found = weights.read_matrix(name)
        assert isinstance(found, torch.Tensor) == (not dequantized(found).isfinite().all())
        assert torch.equal(dequantized(found).nan_to_num(), weights.read(name).nan_to_num())
