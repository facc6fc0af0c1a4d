"""Qwen 3's logits are those of transformers, in folders and GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from transformers import Qwen3Config

import family
from inflight.errors import ConfigError
from inflight.models.registry import read_spec

WINDOWED = {"use_sliding_window": True, "sliding_window": family.WINDOW, "max_window_layers": 1}


class TestQwen3(family.Suite):
    config = Qwen3Config
    variants: ClassVar = {
        "default": {},
        "window": WINDOWED,
        "biased": {"attention_bias": True},
        "tied": {"tie_word_embeddings": True},
    }
    architecture = "qwen3"

    def metadata(self, config: Any) -> dict[str, Any]:
        if not config.use_sliding_window:
            return {}
        # As config.json says it; llama.cpp's converter writes no window.
        return {
            "use_sliding_window": True,
            "attention.sliding_window": config.sliding_window,
            "max_window_layers": config.max_window_layers,
        }


def test_layer_types_of_another_kind_are_refused(tmp_path: Path) -> None:
    model = family.make(Qwen3Config(**family.SHAPE, layer_types=["full_attention"] * 4))
    checkpoint = family.write_folder(model, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace("full_attention", "linear_attention"))
    with pytest.raises(ConfigError, match=r"layer_types: .*linear_attention.*; allowed: full_att"):
        read_spec(checkpoint)
