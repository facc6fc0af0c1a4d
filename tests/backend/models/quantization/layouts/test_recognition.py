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
        (compressed({"strategy": None}), "INT4", (packed(),)),
        (compressed(quantization_status="frozen"), "INT4", (packed(),)),
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


# ---------------------------------------------------------------- AWQ and GPTQ

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}


def awq(group: int = 128) -> Layout:
    return Layout("awq", "int4", frozenset({4}), frozenset({group}), symmetric=False)


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        (AWQ, awq()),
        (AWQ | {"version": "GEMM", "group_size": -1}, awq(ROW)),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, awq(64)),
    ],
)
def test_awq(tmp_path: Path, config: dict[str, Any], layout: Layout) -> None:
    assert found(tmp_path, config) == StoredFormat("INT4 (AWQ)", frozenset(), layouts=(layout,))


@pytest.mark.parametrize(
    "changes",
    [
        {"version": "gemv"},
        {"version": "marlin"},
        {"bits": 8},
        {"zero_point": False},
        {"group_size": 0},
    ],
)
def test_other_versions_of_awq_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"in the format AWQ \(bits"):
        found(tmp_path, AWQ | changes)


def gptq(bits: set[int] | None = None, groups: set[int] | None = None, **more: Any) -> Layout:
    bits = bits or {4}
    label = " and ".join(f"int{each}" for each in sorted(bits))
    rest = {"stored_less": 1} | more
    return Layout("gptq", label, frozenset(bits), frozenset(groups or {128}), **rest)


MIXED = {"dynamic": {"+:.*down.*": {"bits": 8, "group_size": 32}, "-:.*gate.*": {}}}


@pytest.mark.parametrize(
    ("changes", "layout"),
    [
        ({}, gptq()),
        ({"checkpoint_format": "gptq"}, gptq()),
        ({"checkpoint_format": "gptq_v2"}, gptq(stored_less=0)),
        ({"format": "gptq_v2"}, gptq(stored_less=0)),
        ({"sym": False}, gptq(symmetric=False)),
        ({"desc_act": True, "static_groups": True}, gptq(has_order=True)),
        ({"bits": 8, "group_size": -1}, gptq({8}, {ROW})),
        (MIXED, gptq({4, 8}, {32, 128})),
    ],
)
def test_gptq(tmp_path: Path, changes: dict[str, Any], layout: Layout) -> None:
    expected = StoredFormat(f"{layout.label.upper()} (GPTQ)", frozenset(), layouts=(layout,))
    assert found(tmp_path, GPTQ | changes) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"bits": 2},
        {"bits": 3},
        {"bits": [4]},
        {"checkpoint_format": "marlin"},
        {"is_marlin_format": True},
        {"pack_dtype": "int16"},
        {"group_size": None},
        {"dynamic": {"+:.*": {"sym": False}}},
        {"dynamic": {".*": {"bits": 2}}},
        {"dynamic": {".*": 4}},
        {"dynamic": ["-:.*"]},
    ],
)
def test_other_kinds_of_gptq_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"in the format GPTQ \(bits"):
        found(tmp_path, GPTQ | changes)


def test_what_cannot_be_honoured_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"dynamic \{'\+:x': \{'sym': False\}\}"):
        found(tmp_path, GPTQ | {"dynamic": {"+:x": {"sym": False}}})


# ---------------------------------------------------------------- 4-bit floats

NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
FP4 = {"quant_method": "bitsandbytes", "_load_in_4bit": True}


def four(kind: Any, label: str, groups: set[int]) -> Layout:
    return Layout(kind, label, frozenset({4}), frozenset(groups))


@pytest.mark.parametrize(
    ("config", "name", "layout"),
    [
        (
            compressed(NVFP4, format="nvfp4-pack-quantized"),
            "NVFP4 (compressed-tensors)",
            four("nvfp4", "nvfp4", {16}),
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            "NVFP4 (ModelOpt)",
            four("nvfp4", "nvfp4", {16}),
        ),
        ({"quant_method": "mxfp4"}, "MXFP4", four("mxfp4", "mxfp4", {32})),
        (NF4, "NF4 (bitsandbytes)", four("bitsandbytes", "nf4", set())),
        (FP4, "FP4 (bitsandbytes)", four("bitsandbytes", "fp4", set())),
    ],
)
def test_floats_of_4_bits(
    tmp_path: Path, config: dict[str, Any], name: str, layout: Layout
) -> None:
    assert found(tmp_path, config) == StoredFormat(name, frozenset(), layouts=(layout,))


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        NF4 | {"bnb_4bit_quant_type": "int4"},
        {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"},
        compressed(NVFP4 | {"group_size": 32}, format="nvfp4-pack-quantized"),
        compressed(NVFP4 | {"type": "int"}, format="nvfp4-pack-quantized"),
        compressed(NVFP4 | {"symmetric": False}, format="nvfp4-pack-quantized"),
    ],
)
def test_other_floats_of_4_bits_are_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="is not supported; allowed: unquantised weights"):
        found(tmp_path, config)
