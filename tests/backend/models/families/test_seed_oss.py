"""Seed-OSS's logits are those of transformers."""

from __future__ import annotations

from typing import ClassVar

from transformers import SeedOssConfig

import family


class TestSeedOss(family.Suite):
    config = SeedOssConfig
    variants: ClassVar = {
        "biased": {},
        "more biases": {"attention_out_bias": True, "mlp_bias": True},
    }
    architecture = "seed_oss"
