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
_INT4: Quantization = "int4"


@dataclass(frozen=True, slots=True)
class GpuFormat:
    """How linear layers run on a GPU, the output layer excepted.

    Attributes:
        dtypes: types of the weights that keep 8 bits, FP8 or INT8; the others are dequantised.
        weight_only: whether activations keep 16 bits.
    """

    dtypes: frozenset[str] = frozenset()
    weight_only: bool = False

    @property
    def name(self) -> str:
        """As of `linear_format`."""
        return " and ".join(_NAMES[dtype] for dtype in sorted(self.dtypes)) or UNQUANTISED


def gpu_format(checkpoint: Checkpoint, quantization: Quantization, is_hopper: bool) -> GpuFormat:
    """How linear layers run on a GPU.

    Only Hopper's kernels multiply values of 8 bits with each other.

    Args:
        checkpoint: the model's files.
        quantization: the setting.
        is_hopper: whether the GPU is one.

    Raises:
        ConfigError: see `linear_format`; or there are no products for the setting.
    """
    stored = _stored_format(checkpoint)
    if quantization == _INT4:
        _check_same(checkpoint, stored, quantization)
        allowed = ["fp8", "int8", "auto", "none"] if stored is None else ["auto", "none"]
        raise ConfigError(
            f"quantization: {quantization} is not supported on GPUs; allowed there: "
            f"{', '.join(allowed)}; use {allowed[0]}, or device: cpu"
        )
    if quantization in _NAMES.values():
        _check_same(checkpoint, stored, quantization)
        dtypes = frozenset(dtype for dtype, name in _NAMES.items() if name == quantization)
        return GpuFormat(dtypes, weight_only=not is_hopper)
    if quantization == "none" or stored is None or stored.block is not None or not stored.dtypes:
        return GpuFormat()
    return GpuFormat(stored.dtypes, stored.weight_only or not is_hopper)


def linear_format(checkpoint: Checkpoint, quantization: Quantization) -> str:
    """The format of linear layers on a CPU, the output layer excepted: fp8, int8, those of values
    in groups such as int4, or several of them; UNQUANTISED for 16 or 32 bits.

    Args:
        checkpoint: the model's files.
        quantization: the setting.

    Raises:
        ConfigError: the checkpoint is quantised to other values than those of the setting.
    """
    stored = _stored_format(checkpoint)
    if quantization in (*_NAMES.values(), _INT4):
        _check_same(checkpoint, stored, quantization)
        return quantization if stored is None else " and ".join(_names(stored))
    if quantization == "none" or stored is None:
        return UNQUANTISED
    names = _names(stored) if stored.is_executable else stored.labels
    return " and ".join(names) or UNQUANTISED


def rounds_weights(checkpoint: Checkpoint, quantization: Quantization) -> bool:
    """Whether the setting rounds weights to 4 bits, which changes what a model says. Folders of 4
    bits are left as they are, also the layers that they have in 16: their authors chose them."""
    return quantization == _INT4 and _stored_format(checkpoint) is None


def num_quantized(checkpoint: Checkpoint, spec: ModelSpec, quantization: Quantization) -> int:
    """How many values of a model's weights have 8 bits on a CPU.

    Parts of fused layers that differ in format are counted although they are dequantised.

    Args:
        checkpoint: the model's files.
        spec: of the model.
        quantization: the setting.

    Raises:
        ConfigError: see `linear_format`; or the files are corrupt.
    """
    linear_format(checkpoint, quantization)
    if quantization in _NAMES.values():
        return spec.quantizable_elements
    stored = _stored_format(checkpoint)
    if quantization != "auto" or stored is None or not stored.is_executable:
        return 0
    return _num_stored(checkpoint, stored.dtypes)


def num_quantized_on_gpu(
    checkpoint: Checkpoint, spec: ModelSpec, quantization: Quantization, found: GpuFormat
) -> int:
    """`num_quantized` on a GPU, where linear layers run in the format `found`."""
    if not found.dtypes:
        return 0
    if quantization != "auto":
        return spec.quantizable_elements
    return _num_stored(checkpoint, found.dtypes)


def _num_stored(checkpoint: Checkpoint, dtypes: frozenset[str]) -> int:
    """Values of the layers' tensors of these types."""
    from inflight.checkpoint import safetensors

    tensors = safetensors.read_folder(checkpoint.path, safetensors.WEIGHTS + safetensors.QUANTIZED)
    return sum(
        math.prod(tensor.shape)
        for name, tensor in tensors.items()
        if tensor.dtype in dtypes and name.startswith("model.layers.") and name.endswith(".weight")
    )


def _stored_format(checkpoint: Checkpoint) -> StoredFormat | None:
    if checkpoint.format == "gguf" or checkpoint.random_weights:
        return None
    return format_of(checkpoint.path)


def _check_same(
    checkpoint: Checkpoint, stored: StoredFormat | None, quantization: Quantization
) -> None:
    if stored is None:
        return
    same = _names(stored)
    if stored.layouts:
        same = [_INT4] if not stored.dtypes and stored.bits == {4} else []
    if same != [quantization]:
        allowed = ["auto", "none", *(same if len(same) == 1 else ())]
        raise ConfigError(
            f"quantization: {quantization} is not supported for {checkpoint.path}, whose weights "
            f"are quantised already: {stored.name}; allowed for it: {', '.join(allowed)}; for "
            f"{quantization}, use the model with weights of 16 bits"
        )


def _names(stored: StoredFormat) -> list[str]:
    """Of values, as in settings or as files call them."""
    return list(dict.fromkeys((*_names_of_8_bits(stored), *stored.labels)))


def _names_of_8_bits(stored: StoredFormat) -> list[str]:
    return [_NAMES[dtype] for dtype in sorted(stored.dtypes)]
