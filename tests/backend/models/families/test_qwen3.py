"""Qwen 3's logits are those of transformers, in folders and GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
from transformers import Qwen3Config

import family
import tiny_gguf
from inflight.errors import ConfigError
from inflight.models.registry import read_spec

WINDOWED = {"use_sliding_window": True, "sliding_window": family.WINDOW, "max_window_layers": 1}


def make(**changes: Any) -> Any:
    return family.make(Qwen3Config(**(family.SHAPE | changes)))


@pytest.mark.parametrize(
    "changes", [{}, WINDOWED, {"attention_bias": True}, {"tie_word_embeddings": True}], ids=str
)
@pytest.mark.parametrize(
    "steps", [family.AT_ONCE, family.TOKEN_BY_TOKEN, family.MIXED], ids=["once", "tokens", "mixed"]
)
def test_logits_equal_those_of_transformers(
    tmp_path: Path, changes: dict[str, Any], steps: list[list[family.Span]]
) -> None:
    model = make(**changes)
    family.check(family.write_folder(model, tmp_path), model, steps)


def test_the_old_spelling_of_the_settings_means_the_same(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e6}
    model = make(**WINDOWED, rope_parameters=rope)
    family.check(family.write_folder(model, tmp_path, old_spelling=True), model)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_logits_of_a_gguf_file_equal_those_of_transformers(tmp_path: Path, kind: str) -> None:
    model = make()
    type_ = gguf.GGMLQuantizationType[kind]
    model.load_state_dict(tiny_gguf.rounded(model.state_dict(), type_))
    family.check(family.write_gguf(model, tmp_path / "x.gguf", "qwen3", kind=type_), model)


def test_layer_types_of_another_kind_are_refused(tmp_path: Path) -> None:
    model = make(layer_types=["full_attention"] * 4)
    checkpoint = family.write_folder(model, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace("full_attention", "linear_attention"))
    with pytest.raises(ConfigError, match=r"layer_types: .*linear_attention.*; allowed: full_att"):
        read_spec(checkpoint)
