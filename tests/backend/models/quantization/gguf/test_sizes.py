"""What a file's header says of memory is what its matrices take."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Kind
from transformers import DeepseekV2Config, MixtralConfig, Qwen2MoeConfig

import family
import latents
import tiny
import tiny_gguf
from inflight.checkpoint.locate import Checkpoint
from inflight.models.loader import linear_names, weight_shapes
from inflight.models.quantization.gguf.sizes import kept_embeddings, kept_layers
from inflight.models.quantization.grouped import GroupedMatrix
from inflight.models.quantization.grouped_memory import KeptValues
from inflight.models.registry import read_spec
from inflight.models.stored.weights import open_weights

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
SHARED = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}


def of_experts(path: Path, kind: Kind) -> Checkpoint:
    model = family.make(MixtralConfig(**{"pad_token_id": 0, **family.SHAPE, **EXPERTS}))
    metadata = {"expert_count": 4, "expert_used_count": 2}
    return family.write_gguf(model, path, "llama", kind, **metadata)


def of_a_shared_expert(path: Path, kind: Kind) -> Checkpoint:
    model = family.make(Qwen2MoeConfig(**{"pad_token_id": 0, **family.SHAPE, **SHARED}))
    metadata: dict[str, Any] = {
        "expert_count": 4,
        "expert_used_count": 2,
        "expert_feed_forward_length": 32,
        "expert_shared_feed_forward_length": 64,
    }
    return family.write_gguf(model, path, "qwen2moe", kind, **metadata)


def of_latents(path: Path, kind: Kind) -> Checkpoint:
    sizes = latents.SHAPE | latents.EXPERTS
    model = family.make(DeepseekV2Config(**{"pad_token_id": 0, **family.SHAPE, **sizes}))
    metadata = latents.metadata(model.config)
    return family.write_gguf(model, path, "deepseek2", kind, **metadata)


def found_in(checkpoint: Checkpoint, names: Iterable[str]) -> tuple[int, int]:
    """Values and bytes of the matrices that keep their bits; a scale has 16."""
    spec = read_spec(checkpoint)
    weights = open_weights(checkpoint, spec, weight_shapes(spec))
    num_values = num_bytes = 0
    for name in names:
        matrix = weights.read_matrix(name)
        assert isinstance(matrix, GroupedMatrix)
        num_values += matrix.codes.numel()
        num_bytes += matrix.codes.numel() // (2 if matrix.bits == 4 else 1)
        num_bytes += 2 * matrix.scales.numel() * (1 if matrix.minimums is None else 2)
    return num_values, num_bytes


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_1, Kind.Q8_0])
@pytest.mark.parametrize(
    "write", [tiny_gguf.write_gguf, of_experts, of_a_shared_expert, of_latents]
)
def test_layers_take_what_their_matrices_take(
    tmp_path: Path, write: Callable[[Path, Kind], Checkpoint], kind: Kind
) -> None:
    checkpoint = write(tmp_path / "x.gguf", kind)
    spec = read_spec(checkpoint)
    kept = kept_layers(checkpoint.path, spec.num_layers)
    assert kept.types == (kind.name,)
    assert (kept.num_values, kept.num_bytes) == found_in(checkpoint, linear_names(spec))


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_embedding_counts_once(tmp_path: Path, tied: bool) -> None:
    original = tiny.random_weights(tiny.SETTINGS)
    if tied:
        del original["lm_head.weight"]
    checkpoint = tiny_gguf.write_gguf(tmp_path / "x.gguf", Kind.Q8_0, original)
    spec = read_spec(checkpoint)
    assert spec.tie_word_embeddings == tied
    names = ["model.embed_tokens.weight", "lm_head.weight"][: 1 if tied else 2]
    kept = kept_embeddings(checkpoint.path, tied=tied)
    assert (kept.num_values, kept.num_bytes) == found_in(checkpoint, names)
    assert kept.bits == 8.5
    untied = kept_embeddings(checkpoint.path, tied=False)
    assert untied == kept


def test_an_output_layer_that_a_tied_model_has_all_the_same_does_not_count(tmp_path: Path) -> None:
    path = tiny_gguf.write_gguf(tmp_path / "x.gguf", Kind.Q8_0).path
    apart = kept_embeddings(path, tied=False)
    assert 2 * kept_embeddings(path, tied=True).num_values == apart.num_values


def test_wider_types_are_not_kept(tmp_path: Path) -> None:
    path = tiny_gguf.write_gguf(tmp_path / "x.gguf", Kind.BF16).path
    assert kept_layers(path) == kept_embeddings(path, tied=False) == KeptValues()


def test_layers_behind_the_last_one_do_not_count(tmp_path: Path) -> None:
    path = tiny_gguf.write_gguf(tmp_path / "x.gguf", Kind.Q8_0).path
    assert 2 * kept_layers(path, 1).num_values == kept_layers(path).num_values


def test_the_type_of_most_weights_is_named_first(tmp_path: Path) -> None:
    tensors = {}
    for name, kind, rows in (
        ("attn_v", Kind.Q6_K, 4),
        ("attn_q", Kind.Q4_K, 8),
        ("ffn_gate_inp", Kind.Q8_0, 64),
    ):
        blocks = tiny_gguf.drawn_blocks(kind, rows * (8 if kind == Kind.Q8_0 else 1))
        tensors[f"blk.0.{name}.weight"] = kind, blocks.reshape(rows, -1)
    kept = kept_layers(tiny_gguf.write_tensors(tmp_path / "x.gguf", tensors))
    assert kept.types == ("Q4_K", "Q6_K")
    assert kept.bits == (8 * 5 + 4 * 9) / 12
