"""In which format the linear layers of a checkpoint run, by the setting `quantization`.

Importing this module does not import torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from inflight.checkpoint.locate import Checkpoint
from inflight.config import Quantization
from inflight.errors import ConfigError
from inflight.models.quantization.recognition import FP8, INT8, StoredFormat, format_of
from inflight.models.spec import ModelSpec

UNQUANTISED = "none"
_NAMES = {FP8: "fp8", INT8: "int8"}


@dataclass(frozen=True, slots=True)
class LinearFormat:
    """The format of a model's linear layers, the output layer excepted.

    Attributes:
        name: fp8, int8 or both; none for 16 or 32 bits a value.
        num_values: of weights that have 8 bits each; parts of fused layers that differ in format
            are counted although they are dequantised.
    """

    name: str
    num_values: int


def linear_format(
    checkpoint: Checkpoint, spec: ModelSpec, quantization: Quantization
) -> LinearFormat:
    """The format with a setting.

    Args:
        checkpoint: the model's files.
        spec: of the model.
        quantization: the setting.

    Raises:
        ConfigError: the checkpoint is quantised to other values of 8 bits than those of the
            setting.
    """
    is_folder = checkpoint.format != "gguf" and not checkpoint.random_weights
    stored = format_of(checkpoint.path) if is_folder else None
    if quantization in ("fp8", "int8"):
        _check_same(checkpoint, stored, quantization)
        return LinearFormat(quantization, spec.num_layers * spec.matrix_elements_per_layer)
    if quantization == "none" or stored is None or not stored.is_executable:
        return LinearFormat(UNQUANTISED, 0)
    return LinearFormat(_name(stored), _num_quantized(checkpoint, stored))


def _check_same(
    checkpoint: Checkpoint, stored: StoredFormat | None, quantization: Quantization
) -> None:
    names = [] if stored is None else [_NAMES[dtype] for dtype in stored.dtypes]
    if stored is not None and names != [quantization]:
        allowed = ["auto", "none", *(names if len(names) == 1 else ())]
        raise ConfigError(
            f"quantization: {quantization} is not supported for {checkpoint.path}, whose weights "
            f"are quantised already: {stored.name}; allowed for it: {', '.join(allowed)}; for "
            f"{quantization}, use the model with weights of 16 bits"
        )


def _name(stored: StoredFormat) -> str:
    return " and ".join(_NAMES[dtype] for dtype in sorted(stored.dtypes))


def _num_quantized(checkpoint: Checkpoint, stored: StoredFormat) -> int:
    """Values of 8 bits in the layers; a format may leave some of them in 16 bits."""
    from inflight.checkpoint import safetensors

    dtypes = safetensors.WEIGHTS + safetensors.QUANTIZED
    tensors = safetensors.read_folder(checkpoint.path, dtypes)
    return sum(
        math.prod(tensor.shape)
        for name, tensor in tensors.items()
        if tensor.dtype in stored.dtypes and name.startswith("model.layers.")
    )
