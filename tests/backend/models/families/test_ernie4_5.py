"""ERNIE 4.5's logits are those of transformers."""

from __future__ import annotations

from typing import ClassVar

from transformers import Ernie4_5Config

import family


class TestErnie45(family.Suite):
    config = Ernie4_5Config
    variants: ClassVar = {"tied": {"tie_word_embeddings": True}, "biased": {"use_bias": True}}
    architecture = "ernie4_5"
