"""Layouts of codes with scales of groups are recognised by what config.json says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inflight.checkpoint.checked_fields import CheckedFields
from inflight.errors import ConfigError
from inflight.models.quantization.layouts.layout import ROW, Layout
from inflight.models.quantization.recognition import FP8, StoredFormat, read_format


def found(folder: Path, config: dict[str, Any]) -> StoredFormat | None:
    fields = {"model_type": "llama", "quantization_config": config}
    return read_format(CheckedFields(fields, "config.json"), folder)


# ---------------------------------------------------------------- compressed-tensors

PLAIN = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}


def compressed(*weights: dict[str, Any], **settings: Any) -> dict[str, Any]:
    groups = {
        f"group_{index}": {"targets": ["Linear"], "weights": PLAIN | one}
        for index, one in enumerate(weights or ({},))
    }
    common = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    return common | {"config_groups": groups} | settings


def packed(bits: int = 4, group: int = 128, **more: Any) -> Layout:
    return Layout("packed", f"int{bits}", frozenset({bits}), frozenset({group}), **more)


@pytest.mark.parametrize(
    ("config", "name", "layouts"),
    [
        (compressed(), "INT4", (packed(),)),
        (compressed({"num_bits": 8}), "INT8", (packed(8),)),
        (compressed({"symmetric": False}), "INT4", (packed(symmetric=False),)),
        (compressed({"strategy": "channel", "group_size": None}), "INT4", (packed(group=ROW),)),
        (compressed({"group_size": -1}), "INT4", (packed(group=ROW),)),
        (compressed({"actorder": "group"}), "INT4", (packed(has_order=True),)),
        (compressed({"actorder": "weight"}), "INT4", (packed(),)),
        (
            compressed({}, {"num_bits": 8, "group_size": 64}),
            "INT4 and INT8",
            (packed(), packed(8, 64)),
        ),
    ],
)
def test_compressed_tensors(
    tmp_path: Path, config: dict[str, Any], name: str, layouts: tuple[Layout, ...]
) -> None:
    expected = StoredFormat(f"{name} (compressed-tensors)", frozenset(), layouts=layouts)
    assert found(tmp_path, config) == expected
    assert expected.labels == name.lower().split(" and ")
    assert not expected.is_executable


def test_each_group_of_a_mixture_has_a_format_of_its_own(tmp_path: Path) -> None:
    config = compressed(
        {}, {"num_bits": 8, "type": "float", "strategy": "channel"}, format="mixed-precision"
    )
    first, second = config["config_groups"].values()
    first["format"], second["format"] = "pack-quantized", "float-quantized"
    second["input_activations"] = {"num_bits": 8, "type": "float", "dynamic": True}
    assert found(tmp_path, config) == StoredFormat(
        "FP8 and INT4 (compressed-tensors)", frozenset({FP8}), layouts=(packed(),)
    )


@pytest.mark.parametrize(
    "weights",
    [
        {"num_bits": 3},
        {"type": "float"},
        {"strategy": "tensor"},
        {"strategy": "block"},
        {"group_size": 0},
        {"group_size": None},
        {"group_size": True},
        {"group_size": "128"},
        {"dynamic": True},
    ],
)
def test_other_packed_weights_are_refused(tmp_path: Path, weights: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"compressed-tensors \(format pack-quantized\)"):
        found(tmp_path, compressed(weights))
