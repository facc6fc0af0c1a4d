"""Families whose checkpoints have layers that predict further tokens, which are not loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import family
from inflight.errors import ConfigError
from inflight.models.registry import read_spec


class Suite(family.Suite):
    """What such a family must show beside what every family must. Variants have no such layer."""

    def test_layers_that_predict_further_tokens_are_not_loaded(
        self, tmp_path: Path, changes_of_first: dict[str, Any]
    ) -> None:
        model = self.make(changes_of_first)
        checkpoint = family.write_folder(model, tmp_path)
        path = tmp_path / "model.safetensors"
        further = {"eh_proj.weight": torch.ones(64, 128), "mlp.gate.weight": torch.ones(8, 64)}
        save_file(
            load_file(path) | {f"model.layers.4.{name}": one for name, one in further.items()}, path
        )
        with pytest.raises(ConfigError, match=r"unexpected tensors .*model\.layers\.4\."):
            family.our_logits(checkpoint, [family.tokens()], family.AT_ONCE[:1])
        config = tmp_path / "config.json"
        text = config.read_text()
        config.write_text(
            text.replace('"num_nextn_predict_layers": 0', '"num_nextn_predict_layers": 1')
        )
        assert config.read_text() != text
        family.check(checkpoint, model)

    def test_a_gguf_file_counts_them_among_its_layers(
        self, tmp_path: Path, changes_of_first: dict[str, Any]
    ) -> None:
        model = self.make(changes_of_first)
        further = {
            "blk.4.nextn.eh_proj.weight": np.ones((64, 128), np.float32),
            "blk.4.attn_norm.weight": np.ones(64, np.float32),
        }
        checkpoint = family.write_gguf(
            model,
            tmp_path / "x.gguf",
            self.architecture,
            extra=further,
            **self.metadata(model.config) | {"block_count": 5, "nextn_predict_layers": 1},
        )
        assert read_spec(checkpoint).num_layers == 4
        family.check(checkpoint, model)
