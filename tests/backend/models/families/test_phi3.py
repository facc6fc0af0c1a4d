"""Phi 3's logits are those of transformers, with windows and contexts that its texts outgrow."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from transformers import Phi3Config

import family

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.2, 1.5, 1.7, 2.0, 2.5],
    "long_factor": [1.0, 2.0, 3.0, 5.0, 8.0, 13.0],
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 16,
}
# Heads are hidden_size / num_heads wide.
LONG = {
    "head_dim": family.ABSENT,
    "original_max_position_embeddings": 16,
    "rope_parameters": LONGROPE,
}


class TestPhi3(family.Suite):
    config = Phi3Config
    variants: ClassVar = {
        "window": {"head_dim": family.ABSENT, "sliding_window": family.WINDOW},
        "long": LONG,
    }
    architecture = "phi3"

    def metadata(self, config: Any) -> dict[str, Any]:
        # The converter writes no attention.key_length.
        keys = {"attention.key_length": None, "attention.value_length": None}
        if config.sliding_window:
            return keys | {"attention.sliding_window": config.sliding_window}
        return keys | {
            "attention.sliding_window": 0,
            "rope.dimension_count": 12,
            "rope.scaling.original_context_length": 16,
            "rope.scaling.attn_factor": float((1 + np.log(256 / 16) / np.log(16)) ** 0.5),
        }

    def extra(self, config: Any) -> dict[str, np.ndarray]:
        if config.sliding_window:
            return {}
        return {
            f"rope_factors_{kind}.weight": np.array(LONGROPE[f"{kind}_factor"], np.float32)
            for kind in ("short", "long")
        }

    @pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
    def test_within_the_trained_context_the_short_factors_are_used(
        self, tmp_path: Path, kind: str
    ) -> None:
        rope = LONGROPE | {"original_max_position_embeddings": 64}
        model = self.make(LONG | {"rope_parameters": rope, "original_max_position_embeddings": 64})
        checkpoint = family.write_folder(model, tmp_path)
        path = tmp_path / "config.json"
        path.write_text(path.read_text().replace('"longrope"', f'"{kind}"'))
        family.check(checkpoint, model, max_len=64)
