"""Mistral's logits are those of transformers, with windows that its texts outgrow."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import MistralConfig

import family
from inflight.models.registry import read_spec


@pytest.mark.parametrize("window", [family.WINDOW, None], ids=["window", "no window"])
@pytest.mark.parametrize(
    "steps", [family.AT_ONCE, family.TOKEN_BY_TOKEN, family.MIXED], ids=["once", "tokens", "mixed"]
)
def test_logits_equal_those_of_transformers(
    tmp_path: Path, window: int | None, steps: list[list[family.Span]]
) -> None:
    model = family.make(MistralConfig(**family.SHAPE, sliding_window=window))
    family.check(family.write_folder(model, tmp_path), model, steps)


def test_the_old_spelling_of_the_settings_means_the_same(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
    config = MistralConfig(**family.SHAPE, sliding_window=family.WINDOW, rope_parameters=rope)
    model = family.make(config)
    family.check(family.write_folder(model, tmp_path, old_spelling=True), model)


@pytest.mark.parametrize("window", [family.WINDOW, None], ids=["window", "no window"])
def test_a_gguf_file_goes_by_llama_s_name(tmp_path: Path, window: int | None) -> None:
    model = family.make(MistralConfig(**family.SHAPE, sliding_window=window))
    metadata = {"attention.sliding_window": window}
    checkpoint = family.write_gguf(model, tmp_path / "x.gguf", "llama", **metadata)
    family.check(checkpoint, model)


def test_a_window_as_long_as_the_context_is_ignored(tmp_path: Path) -> None:
    model = family.make(MistralConfig(**family.SHAPE, sliding_window=256))
    spec = read_spec(family.write_folder(model, tmp_path))
    assert {layer.attention.window for layer in spec.layers} == {0}
    assert len(spec.kv_layout("float32").groups) == 1
