"""Gemma 3's logits are those of transformers, with windows that its texts outgrow."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from transformers import Gemma3TextConfig

import family

ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


class TestGemma3(family.Suite):
    config = Gemma3TextConfig
    variants: ClassVar = {
        "scaled": {
            "num_hidden_layers": 7,
            "sliding_window": family.WINDOW,
            "query_pre_attn_scalar": 32,
            "rope_parameters": ROPES,
            "tie_word_embeddings": True,
        }
    }
    stands_for_others = True
    architecture = "gemma3"
    norm_mean = 0.0

    def metadata(self, config: Any) -> dict[str, Any]:
        return {
            "attention.sliding_window": config.sliding_window,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        }


def test_a_gguf_file_may_state_its_pattern_and_theta(tmp_path: Path) -> None:
    suite = TestGemma3()
    ropes = ROPES | {"sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}
    changes = suite.variants["scaled"] | {"sliding_window_pattern": 3, "rope_parameters": ropes}
    model = suite.make(changes)
    metadata = suite.metadata(model.config) | {
        "attention.sliding_window_pattern": 3,
        "rope.freq_base_swa": 500.0,
    }
    checkpoint = family.write_gguf(model, tmp_path / "x.gguf", "gemma3", **metadata)
    family.check(checkpoint, model)
