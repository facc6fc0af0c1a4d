"""Files of random blocks have the types of a Q4_K_M file and values that stay finite."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

import random_gguf
from inflight.checkpoint.locate import locate
from inflight.models.registry import read_spec

CONFIG = {
    "hidden_size": 512,
    "intermediate_size": 768,
    "vocab_size": 320,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 16,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "random.gguf"
    random_gguf.write(path, CONFIG, random_gguf.Blocks.of_seed(1, pool_bytes=1 << 16))
    return path


def test_types_are_mixed_as_in_q4_k_m(file: Path) -> None:
    kinds = {one.name: one.tensor_type.name for one in gguf.GGUFReader(file).tensors}
    with_more = {layer for layer in range(16) if kinds[f"blk.{layer}.ffn_down.weight"] == "Q6_K"}
    assert with_more == {0, 1, 4, 7, 10, 13, 14, 15}
    for layer in range(16):
        values = kinds[f"blk.{layer}.attn_v.weight"]
        assert values == kinds[f"blk.{layer}.ffn_down.weight"]
        assert kinds[f"blk.{layer}.attn_q.weight"] == kinds[f"blk.{layer}.ffn_up.weight"] == "Q4_K"
    assert (kinds["output.weight"], kinds["token_embd.weight"]) == ("Q6_K", "Q4_K")


def test_values_are_small_and_have_a_mean_near_zero(file: Path) -> None:
    for one in gguf.GGUFReader(file).tensors:
        if len(one.shape) < 2:
            continue
        values = gguf.dequantize(one.data, one.tensor_type)
        assert np.isfinite(values).all()
        assert 0.001 < values.std() < 1.0
        assert abs(values.mean()) < 0.5 * values.std()


def test_the_shape_is_that_of_the_config(file: Path) -> None:
    spec = read_spec(locate(str(file)))
    assert (spec.hidden_size, spec.num_layers, spec.vocab_size) == (512, 16, 320)
    attention = spec.layers[0].attention
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (8, 4, 64)
