"""Recognises the formats of quantised Hugging Face folders; others are refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inflight.checkpoint.checked_fields import CheckedFields, read_json
from inflight.models.quantization.layouts import recognition as layouts
from inflight.models.quantization.layouts.layout import Layout

# `quantization_config.quant_method` -> the format's name, and the keys that say which kind.
_METHODS: dict[str, tuple[str, tuple[str, ...]]] = {
    "aqlm": ("AQLM", ()),
    "auto-round": ("AutoRound", ("bits",)),
    "awq": ("AWQ", ("bits", "version")),
    "bitnet": ("BitNet", ()),
    "bitsandbytes": ("bitsandbytes", ("load_in_8bit", "load_in_4bit", "bnb_4bit_quant_type")),
    "compressed-tensors": ("compressed-tensors", ("format",)),
    "eetq": ("EETQ", ()),
    "exl2": ("EXL2", ("bits",)),
    "exl3": ("EXL3", ("bits",)),
    "fp8": ("FP8", ("activation_scheme", "weight_block_size")),
    "gptq": ("GPTQ", ("bits", "group_size", "checkpoint_format", "dynamic")),
    "higgs": ("HIGGS", ("bits",)),
    "hqq": ("HQQ", ()),
    "modelopt": ("ModelOpt", ("quant_algo",)),
    "mxfp4": ("MXFP4", ()),
    "quanto": ("Quanto", ("weights",)),
    "quark": ("Quark", ()),
    "spqr": ("SpQR", ("bits",)),
    "torchao": ("torchao", ("quant_type",)),
    "vptq": ("VPTQ", ()),
}
MODELOPT_FILE = "hf_quant_config.json"

FP8, INT8 = "F8_E4M3", "I8"
"""Types of tensors in safetensors files."""
_COMPRESSED_FORMATS = {"float-quantized": FP8, "int-quantized": INT8, "naive-quantized": None}
_COMPRESSED_TYPES = {"float": FP8, "int": INT8}


@dataclass(frozen=True, slots=True)
class StoredFormat:
    """How the quantised weights of a folder are stored: 8 bits a value times a scale, or codes with
    scales of groups of columns, or some of them so and some so.

    Attributes:
        name: for messages, such as FP8.
        dtypes: of weights of 8 bits: FP8, INT8, both or none.
        block: rows and columns with a scale in common; None for one scale of each tensor or of each
            row, which the shape of the scales tells.
        weight_only: whether activations are meant to keep their 16 or 32 bits, of some layers with
            weights of 8 bits at least.
        layouts: of codes with scales of groups. Activations keep their 16 or 32 bits.
    """

    name: str
    dtypes: frozenset[str]
    block: tuple[int, int] | None = None
    weight_only: bool = False
    layouts: tuple[Layout, ...] = ()

    @property
    def is_executable(self) -> bool:
        """Whether there are products for it of weights and activations of 8 bits each."""
        return bool(self.dtypes) and self.block is None and not self.weight_only

    @property
    def bits(self) -> frozenset[int]:
        """Of codes in groups."""
        return frozenset[int]().union(*(layout.bits for layout in self.layouts))

    @property
    def labels(self) -> list[str]:
        """Of values in groups, such as int4."""
        labels = {label for layout in self.layouts for label in layout.label.split(" and ")}
        return sorted(labels)


def read_format(fields: CheckedFields, folder: Path) -> StoredFormat | None:
    """The format of a folder's quantised weights; None if they are not quantised.

    Args:
        fields: of its config.json.
        folder: with the checkpoint's files.

    Raises:
        ConfigError: the format is not supported; the message names it.
    """
    # MLX writes `quantization`, and a copy of it as quantization_config.
    mlx = fields.get("quantization")
    if isinstance(mlx, dict) and mlx:
        raise _refusal(fields, "quantization", _with_details("MLX", mlx, ("bits", "group_size")))
    config = fields.get("quantization_config")
    if isinstance(config, dict) and config:
        found = _supported(config)
        if found is not None:
            return found
        method = str(config.get("quant_method", "unknown"))
        name, keys = _METHODS.get(method, (repr(method), ()))
        raise _refusal(fields, "quantization_config", _with_details(name, config, keys))
    if (folder / MODELOPT_FILE).is_file():
        beside = read_json(folder / MODELOPT_FILE)
        config = beside.get("quantization", {})
        if isinstance(config, dict) and config.get("quant_algo"):
            found = _modelopt(config)
            if found is not None:
                return found
            name = _with_details("ModelOpt", config, ("quant_algo",))
            raise _refusal(beside, "quantization", name, fields)
    return None


def format_of(folder: Path) -> StoredFormat | None:
    """`read_format` of a folder with a config.json."""
    return read_format(read_json(folder / "config.json"), folder)


def draws_codes(found: StoredFormat | None) -> bool:
    """Whether random weights are drawn in a folder's format: of MXFP4 they are."""
    return found is not None and {layout.kind for layout in found.layouts} == {"mxfp4"}


def _supported(config: dict[str, Any]) -> StoredFormat | None:
    """The format that a quantization_config describes; None if it is not supported."""
    readers = {
        "awq": _awq,
        "bitsandbytes": _bitsandbytes,
        "compressed-tensors": _compressed_tensors,
        "fbgemm_fp8": _fbgemm,
        "fp8": _fp8,
        "gptq": _gptq,
        "modelopt": _modelopt,
        "mxfp4": _mxfp4,
    }
    reader = readers.get(str(config.get("quant_method")))
    return None if reader is None else reader(config)


def _fp8(config: dict[str, Any]) -> StoredFormat | None:
    """Of transformers and DeepSeek, with blocks; of AutoFP8, with a scale for each tensor."""
    if config.get("fmt", "e4m3") != "e4m3":
        return None
    if not config.get("weight_block_size"):
        return StoredFormat("FP8", frozenset({FP8}))
    block = _block(config["weight_block_size"])
    if block is None:
        return None
    return StoredFormat(f"FP8, blocks of {block[0]}x{block[1]}", frozenset({FP8}), block)


def _fbgemm(config: dict[str, Any]) -> StoredFormat:
    """Of Llama 3.1 405B, with a scale for each row."""
    return StoredFormat("FP8 (FBGEMM)", frozenset({FP8}))


def _modelopt(config: dict[str, Any]) -> StoredFormat | None:
    if config.get("quant_algo") == "FP8":
        return StoredFormat("FP8 (ModelOpt)", frozenset({FP8}))
    return _in_groups("ModelOpt", layouts.modelopt(config))


def _awq(config: dict[str, Any]) -> StoredFormat | None:
    return _in_groups("AWQ", layouts.awq(config))


def _gptq(config: dict[str, Any]) -> StoredFormat | None:
    return _in_groups("GPTQ", layouts.gptq(config))


def _bitsandbytes(config: dict[str, Any]) -> StoredFormat | None:
    return _in_groups("bitsandbytes", layouts.bitsandbytes(config))


def _mxfp4(config: dict[str, Any]) -> StoredFormat:
    return StoredFormat("MXFP4", frozenset(), layouts=(layouts.mxfp4(config),))


def _in_groups(writer: str, layout: Layout | None) -> StoredFormat | None:
    if layout is None:
        return None
    return StoredFormat(f"{layout.label.upper()} ({writer})", frozenset(), layouts=(layout,))


def _compressed_tensors(config: dict[str, Any]) -> StoredFormat | None:
    sparsity = config.get("sparsity_config") or {}
    groups = config.get("config_groups")
    if (
        not isinstance(groups, dict)
        or not groups
        or not isinstance(sparsity, dict)
        or sparsity.get("format", "dense") != "dense"
        or config.get("transform_config")
        or config.get("quantization_status", "compressed") not in _statuses(config)
    ):
        return None
    default = str(config.get("format"))
    parts = [_compressed_group(group, default) for group in groups.values()]
    found = [part for part in parts if part is not None]
    in_8_bits = [part for part in found if part.dtypes]
    blocks = {part.block for part in in_8_bits}
    if len(found) < len(parts) or len(blocks) > 1:
        return None
    dtypes = frozenset[str]().union(*(part.dtypes for part in found))
    return StoredFormat(
        f"{' and '.join(sorted({part.name for part in found}))} (compressed-tensors)",
        dtypes,
        next(iter(blocks), None),
        any(part.weight_only for part in in_8_bits),
        tuple(dict.fromkeys(layout for part in found for layout in part.layouts)),
    )


def _statuses(config: dict[str, Any]) -> tuple[str, ...]:
    """Of weights that are stored quantised; the first versions wrote packed ones as frozen."""
    is_packed = config.get("format") in layouts.FORMATS
    return ("compressed", "frozen") if is_packed else ("compressed",)


def _compressed_group(group: Any, default_format: str) -> StoredFormat | None:
    """One of the config_groups of compressed-tensors."""
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        return None
    stored = str(group.get("format") or default_format)
    if stored in layouts.FORMATS:
        layout = layouts.compressed(weights, stored)
        if layout is None:
            return None
        return StoredFormat(layout.label.upper(), frozenset(), layouts=(layout,))
    dtype, strategy = _COMPRESSED_TYPES.get(str(weights.get("type"))), weights.get("strategy")
    if (
        stored not in _COMPRESSED_FORMATS
        or dtype is None
        or _COMPRESSED_FORMATS[stored] not in (None, dtype)
        or weights.get("num_bits") != 8
        or not weights.get("symmetric", True)
        or weights.get("dynamic")
        or strategy not in ("tensor", "channel", "block")
    ):
        return None
    block = _block(weights.get("block_structure")) if strategy == "block" else None
    if strategy == "block" and block is None:
        return None
    activations = group.get("input_activations")
    weight_only = not isinstance(activations, dict) or (
        (activations.get("num_bits"), activations.get("type")) != (8, weights["type"])
    )
    return StoredFormat({FP8: "FP8", INT8: "INT8"}[dtype], frozenset({dtype}), block, weight_only)


def _block(given: Any) -> tuple[int, int] | None:
    """Rows and columns, from a list or a text such as 128x128; None if it is neither."""
    numbers = given.split("x") if isinstance(given, str) else given
    try:
        rows, columns = (int(number) for number in numbers)
    except (TypeError, ValueError):
        return None
    return (rows, columns) if rows > 0 and columns > 0 else None


def _with_details(name: str, config: dict[str, Any], keys: tuple[str, ...]) -> str:
    details = [f"{key} {config[key]}" for key in keys if config.get(key)]
    return f"{name} ({', '.join(details)})" if details else name


def _refusal(
    place: CheckedFields, key: str, name: str, config: CheckedFields | None = None
) -> Exception:
    model_type = (config or place).text("model_type")
    return place.error(
        f"{key}: {model_type} with weights in the format {name} is not supported; allowed: "
        "unquantised weights (BF16, F16, F32), FP8 (e4m3) and INT8 with one scale for each tensor, "
        "row or block (fp8, FBGEMM, compressed-tensors, ModelOpt), 4 and 8 bits with scales of "
        "groups (compressed-tensors pack-quantized, GPTQ), 4 bits (AWQ gemm, NF4 and FP4 of "
        "bitsandbytes, NVFP4, MXFP4 of gpt-oss), and GGUF files in any of their formats; use the "
        "model that was quantised, or a GGUF file of it, such as Q4_K_M or Q8_0"
    )
