"""Mixtral's logits are those of transformers, in folders and GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from transformers import MixtralConfig

import family
from inflight.models.registry import read_spec

EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}


class TestMixtral(family.Suite):
    config = MixtralConfig
    variants: ClassVar = {
        "default": EXPERTS,
        "window": EXPERTS | {"sliding_window": family.WINDOW},
    }
    architecture = "llama"
    on_gpu = True

    def metadata(self, config: Any) -> dict[str, Any]:
        found = {
            "expert_count": config.num_local_experts,
            "expert_used_count": config.num_experts_per_tok,
        }
        if config.sliding_window:
            # As config.json says it; llama.cpp's converter writes no window.
            found["attention.sliding_window"] = config.sliding_window
        return found


def test_a_gguf_file_of_the_architecture_llama_with_experts_is_mixtral(tmp_path: Path) -> None:
    model = family.make(MixtralConfig(**{"pad_token_id": 0, **family.SHAPE, **EXPERTS}))
    checkpoint = family.write_gguf(
        model, tmp_path / "x.gguf", "llama", expert_count=8, expert_used_count=2
    )
    assert read_spec(checkpoint).family == "mixtral"
