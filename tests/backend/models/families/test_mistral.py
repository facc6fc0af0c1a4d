"""Mistral's logits are those of transformers, with windows that its texts outgrow."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from transformers import MistralConfig

import family
from inflight.models.registry import read_spec

SCALED = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}


class TestMistral(family.Suite):
    """Its GGUF files have Llama's name."""

    config = MistralConfig
    variants: ClassVar = {
        "window": {"sliding_window": family.WINDOW},
        "no window": {"sliding_window": None},
        "scaled": {"sliding_window": family.WINDOW, "rope_parameters": SCALED},
    }
    architecture = "llama"

    def metadata(self, config: Any) -> dict[str, Any]:
        scaled = {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
        is_scaled = config.rope_parameters["rope_type"] == "linear"
        window = {"attention.sliding_window": config.sliding_window}
        return window | (scaled if is_scaled else {})


def test_a_window_as_long_as_the_context_is_ignored(tmp_path: Path) -> None:
    model = family.make(MistralConfig(**family.SHAPE, sliding_window=256))
    spec = read_spec(family.write_folder(model, tmp_path))
    assert {layer.attention.window for layer in spec.layers} == {0}
    assert len(spec.kv_layout("float32").groups) == 1
