"""Gemma's logits are those of transformers."""

from __future__ import annotations

from typing import ClassVar

from transformers import GemmaConfig

import family


class TestGemma(family.Suite):
    config = GemmaConfig
    variants: ClassVar = {
        "new": {"tie_word_embeddings": True},
        "old name of GELU": {"tie_word_embeddings": True, "hidden_act": "gelu"},
    }
    architecture = "gemma"
    norm_mean = 0.0
