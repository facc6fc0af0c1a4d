"""Formats of quantised Hugging Face checkpoints, which are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from inflight.checkpoint.checked_fields import CheckedFields, read_json

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
    "fbgemm_fp8": ("FP8 of FBGEMM", ()),
    "fp8": ("FP8", ("activation_scheme", "weight_block_size")),
    "gptq": ("GPTQ", ("bits", "group_size")),
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


def refuse_quantized(fields: CheckedFields, folder: Path) -> None:
    """Refuse a folder with quantised weights.

    Args:
        fields: of its config.json.
        folder: with the checkpoint's files.

    Raises:
        ConfigError: its weights are quantised; the message names the format.
    """
    # MLX writes `quantization`, and a copy of it as quantization_config.
    mlx = fields.get("quantization")
    if isinstance(mlx, dict) and mlx:
        raise _refusal(fields, "quantization", _with_details("MLX", mlx, ("bits", "group_size")))
    config = fields.get("quantization_config")
    if isinstance(config, dict) and config:
        method = str(config.get("quant_method", "unknown"))
        name, keys = _METHODS.get(method, (repr(method), ()))
        raise _refusal(fields, "quantization_config", _with_details(name, config, keys))
    if (folder / MODELOPT_FILE).is_file():
        beside = read_json(folder / MODELOPT_FILE)
        config = beside.get("quantization", {})
        if isinstance(config, dict) and config.get("quant_algo"):
            name = _with_details("ModelOpt", config, ("quant_algo",))
            raise _refusal(beside, "quantization", name, fields)


def _with_details(name: str, config: dict[str, Any], keys: tuple[str, ...]) -> str:
    details = [f"{key} {config[key]}" for key in keys if config.get(key)]
    return f"{name} ({', '.join(details)})" if details else name


def _refusal(
    place: CheckedFields, key: str, name: str, config: CheckedFields | None = None
) -> Exception:
    model_type = (config or place).text("model_type")
    return place.error(
        f"{key}: {model_type} with weights in the format {name} is not supported; allowed: "
        "unquantised weights (BF16, F16, F32), and GGUF files in any of their formats; use the "
        "model that was quantised, or a GGUF file of it, such as Q4_K_M or Q8_0"
    )
