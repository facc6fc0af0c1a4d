"""Qwen 2's logits are those of transformers, in folders and GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
from transformers import Qwen2Config

import family
import tiny_gguf
from inflight.models.registry import read_spec

WINDOWED = {"use_sliding_window": True, "sliding_window": family.WINDOW, "max_window_layers": 2}
SHAPE = {key: value for key, value in family.SHAPE.items() if key != "head_dim"}


def make(**changes: Any) -> Any:
    return family.make(Qwen2Config(**(SHAPE | changes)))


@pytest.mark.parametrize("changes", [{}, WINDOWED, {"tie_word_embeddings": True}], ids=str)
@pytest.mark.parametrize(
    "steps", [family.AT_ONCE, family.TOKEN_BY_TOKEN, family.MIXED], ids=["once", "tokens", "mixed"]
)
def test_logits_equal_those_of_transformers(
    tmp_path: Path, changes: dict[str, Any], steps: list[list[family.Span]]
) -> None:
    model = make(**changes)
    family.check(family.write_folder(model, tmp_path), model, steps)


def test_the_old_spelling_of_the_settings_means_the_same(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
    yarn["original_max_position_embeddings"] = 16
    model = make(**WINDOWED, rope_parameters=yarn)
    family.check(family.write_folder(model, tmp_path, old_spelling=True), model)


def test_layers_with_windows_are_a_group_of_the_kv_cache(tmp_path: Path) -> None:
    spec = read_spec(family.write_folder(make(**WINDOWED), tmp_path))
    assert [layer.attention.window for layer in spec.layers] == [0, 0, family.WINDOW, family.WINDOW]
    assert [group.layers for group in spec.kv_layout("float32").groups] == [(0, 1), (2, 3)]


@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_file_holds_q_and_k_in_halves(tmp_path: Path, tied: bool) -> None:
    model = make(tie_word_embeddings=tied)
    metadata = {"attention.key_length": None, "attention.value_length": None}
    metadata["rope.dimension_count"] = None
    family.check(family.write_gguf(model, tmp_path / "x.gguf", "qwen2", **metadata), model)


def test_a_quantised_gguf_file_is_its_dequantised_weights(tmp_path: Path) -> None:
    model = make()
    kind = gguf.GGMLQuantizationType.Q8_0
    model.load_state_dict(tiny_gguf.rounded(model.state_dict(), kind))
    checkpoint = family.write_gguf(model, tmp_path / "x.gguf", "qwen2", kind=kind)
    family.check(checkpoint, model)
