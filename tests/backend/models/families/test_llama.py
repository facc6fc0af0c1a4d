"""Llama's logits are those of transformers."""

from __future__ import annotations

from typing import ClassVar

from transformers import LlamaConfig

import family


class TestLlama(family.Suite):
    config = LlamaConfig
    variants: ClassVar = {
        "default": {},
        "biased": {"attention_bias": True, "mlp_bias": True},
        "tied": {"tie_word_embeddings": True},
    }
    stands_for_others = True
    architecture = "llama"
