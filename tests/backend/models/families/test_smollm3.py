"""SmolLM3's logits are those of transformers, with and without windows."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
from transformers import SmolLM3Config

import family
from inflight.errors import ConfigError
from inflight.models.registry import read_spec


class TestSmolLM3(family.Suite):
    config = SmolLM3Config
    variants: ClassVar = {"default": {"num_hidden_layers": 5}}
    architecture = "smollm3"

    def test_windows_and_layers_without_rope_are_those_that_are_listed(
        self, tmp_path: Path
    ) -> None:
        changes = {
            "no_rope_layers": [0, 1, 1, 0],
            "use_sliding_window": True,
            "sliding_window": family.WINDOW,
        }
        model = self.make(changes)
        family.check(family.write_folder(model, tmp_path), model)

    def test_a_list_of_another_length_is_refused(self, tmp_path: Path) -> None:
        checkpoint = family.write_folder(self.make({}), tmp_path)
        path = tmp_path / "config.json"
        path.write_text(
            path.read_text().replace('"num_hidden_layers": 4', '"num_hidden_layers": 5')
        )
        with pytest.raises(ConfigError, match=r"no_rope_layers: .*0 or 1 for each of 5 layers"):
            read_spec(checkpoint)
