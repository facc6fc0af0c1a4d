"""Gemma 2's logits are those of transformers, with windows that its texts outgrow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

from transformers import Gemma2Config

import family


class TestGemma2(family.Suite):
    config = Gemma2Config
    # Scores and logits are large enough that the caps change them.
    variants: ClassVar = {
        "capped": {
            "sliding_window": family.WINDOW,
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 2.0,
            "tie_word_embeddings": True,
        },
    }
    architecture = "gemma2"
    norm_mean = 0.0

    def metadata(self, config: Any) -> dict[str, Any]:
        return {
            "attention.sliding_window": config.sliding_window,
            "attn_logit_softcapping": config.attn_logit_softcapping,
            "final_logit_softcapping": config.final_logit_softcapping,
        }


def test_a_cap_that_is_null_is_none(tmp_path: Path) -> None:
    caps = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    model = TestGemma2().make(TestGemma2.variants["capped"] | caps)
    family.check(family.write_folder(model, tmp_path), model)
    path = tmp_path / "config.json"
    assert json.loads(path.read_text())["attn_logit_softcapping"] is None
