"""StableLM's logits are those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from transformers import StableLmConfig

import family
from inflight.errors import ConfigError
from inflight.models.registry import read_spec

SHAPE = {"rms_norm_eps": family.ABSENT, "head_dim": family.ABSENT}


class TestStableLm(family.Suite):
    config = StableLmConfig
    variants: ClassVar = {
        "biased": SHAPE | {"use_qkv_bias": True},
        "parallel": SHAPE | {"use_parallel_residual": True},
    }
    architecture = "stablelm"

    def metadata(self, config: Any) -> dict[str, Any]:
        return {
            "rope.dimension_count": 4,
            "use_parallel_residual": config.use_parallel_residual,
        }

    def test_norms_of_q_and_k_are_refused(self, tmp_path: Path) -> None:
        checkpoint = family.write_folder(self.make(SHAPE | {"qk_layernorm": True}), tmp_path)
        with pytest.raises(ConfigError, match="qk_layernorm: true is not supported"):
            read_spec(checkpoint)
