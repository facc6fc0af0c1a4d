"""Qwen 2's logits are those of transformers, in folders and GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from transformers import Qwen2Config

import family
from inflight.models.registry import read_spec

WINDOWED = {"use_sliding_window": True, "sliding_window": family.WINDOW, "max_window_layers": 2}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "rope_theta": 1e4,
    "original_max_position_embeddings": 16,
}
SHAPE = {"head_dim": family.ABSENT}


class TestQwen2(family.Suite):
    config = Qwen2Config
    variants: ClassVar = {
        "default": SHAPE,
        "window": SHAPE | WINDOWED,
        "window and YaRN": SHAPE | WINDOWED | {"rope_parameters": YARN},
        "tied": SHAPE | {"tie_word_embeddings": True},
    }
    architecture = "qwen2"

    def metadata(self, config: Any) -> dict[str, Any]:
        keys: dict[str, Any] = {
            "attention.key_length": None,
            "attention.value_length": None,
            "rope.dimension_count": None,
        }
        if config.rope_parameters["rope_type"] == "yarn":
            keys |= {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 16,
            }
        if config.use_sliding_window:
            # As config.json says it; llama.cpp's converter writes no window.
            keys |= {
                "use_sliding_window": True,
                "attention.sliding_window": config.sliding_window,
                "max_window_layers": config.max_window_layers,
            }
        return keys


def test_layers_with_windows_are_a_group_of_the_kv_cache(tmp_path: Path) -> None:
    model = family.make(Qwen2Config(**family.SHAPE | WINDOWED))
    spec = read_spec(family.write_folder(model, tmp_path))
    assert [layer.attention.window for layer in spec.layers] == [0, 0, family.WINDOW, family.WINDOW]
    assert [group.layers for group in spec.kv_layout("float32").groups] == [(0, 1), (2, 3)]
