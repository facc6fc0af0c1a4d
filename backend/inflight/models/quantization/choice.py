"""In which format the linear layers of a checkpoint run, by the setting `quantization`.

Importing this module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from inflight.checkpoint.locate import Checkpoint
from inflight.config import Quantization
from inflight.errors import ConfigError
from inflight.models.quantization.gguf.sizes import (
    has_wider_layers,
    kept_embeddings,
    kept_layers,
)
from inflight.models.quantization.grouped_memory import (
    BitsOf,
    KeptValues,
    Shape,
    drawn_experts,
    host_bits,
    kept_in_folder,
    rounded_layers,
)
from inflight.models.quantization.recognition import (
    FP8,
    INT8,
    StoredFormat,
    draws_codes,
    format_of,
)
from inflight.models.spec import ModelSpec

UNQUANTISED = "none"
_NAMES = {FP8: "fp8", INT8: "int8"}
_INT4: Quantization = "int4"
_SPREAD: Quantization = "int8_hadamard"
_8_BITS = (*_NAMES.values(), _SPREAD)


@dataclass(frozen=True, slots=True)
class GpuFormat:
    """How linear layers run on a GPU, the output layer excepted.

    Attributes:
        dtypes: types of the weights that keep 8 bits, FP8 or INT8; the others are dequantised.
        weight_only: whether activations of those layers keep 16 bits.
        keeps_groups: whether codes with scales of groups are multiplied as they are, also those of
            weights that are rounded; if not, they are dequantised.
        spreads: whether weights and activations are Hadamard transformed before they are quantised.
    """

    dtypes: frozenset[str] = frozenset()
    weight_only: bool = False
    keeps_groups: bool = False
    spreads: bool = False

    @property
    def name(self) -> str:
        """As of `linear_format`."""
        if self.spreads:
            return _SPREAD
        return " and ".join(_NAMES[dtype] for dtype in sorted(self.dtypes)) or UNQUANTISED


@dataclass(frozen=True, slots=True)
class CpuFormat:
    """How linear layers run on a CPU, the output layer excepted.

    Attributes:
        quantization: of parts that do not stay in codes with scales of groups: `fp8`, `int8` and
            `int8_hadamard` quantise them, `int4` rounds them, `auto` leaves those of 8 bits as they
            are stored, and `none` dequantises.
        keeps_groups: whether codes with scales of groups are multiplied as they are, also those of
            weights that are rounded; if not, they are dequantised.
    """

    quantization: Quantization = "auto"
    keeps_groups: bool = True


def gpu_format(checkpoint: Checkpoint, quantization: Quantization, is_hopper: bool) -> GpuFormat:
    """How linear layers run on a GPU.

    Only Hopper's kernels multiply values of 8 bits with each other.

    Args:
        checkpoint: the model's files.
        quantization: the setting.
        is_hopper: whether the GPU is one.

    Raises:
        ConfigError: see `linear_format`.
    """
    stored = _stored_format(checkpoint)
    if quantization == _INT4:
        _check_same(checkpoint, stored, quantization)
        return GpuFormat(keeps_groups=True)
    if quantization in _8_BITS:
        _check_same(checkpoint, stored, quantization)
        return GpuFormat(
            frozenset({FP8 if quantization == _NAMES[FP8] else INT8}),
            weight_only=not is_hopper,
            spreads=is_hopper and quantization == _SPREAD,
        )
    if quantization == "none":
        return GpuFormat()
    if stored is None:
        return GpuFormat(keeps_groups=_is_file(checkpoint))
    keeps_groups = bool(stored.layouts)
    if stored.block is not None or not stored.dtypes:
        return GpuFormat(keeps_groups=keeps_groups)
    return GpuFormat(stored.dtypes, stored.weight_only or not is_hopper, keeps_groups)


def check_setting(checkpoint: Checkpoint, quantization: Quantization) -> None:
    """Refuse what cannot be combined.

    Raises:
        ConfigError: the checkpoint is quantised to other values than those of the setting.
    """
    if quantization in (*_8_BITS, _INT4):
        _check_same(checkpoint, _stored_format(checkpoint), quantization)


def linear_format(
    checkpoint: Checkpoint, quantization: Quantization, *, keeps_groups: bool = True
) -> str:
    """The format of linear layers on a CPU, the output layer excepted: fp8, int8, int8_hadamard,
    the types that are kept in groups, such as int4 or those of a GGUF file, or several of them;
    UNQUANTISED for 16 or 32 bits.

    Args:
        checkpoint: the model's files.
        quantization: the setting.
        keeps_groups: whether codes with scales of groups are multiplied as they are; if not, they
            are dequantised.

    Raises:
        ConfigError: see `check_setting`; or the files are corrupt.
    """
    check_setting(checkpoint, quantization)
    if quantization in _8_BITS:
        return quantization
    names: list[str] = []
    if quantization != "none":
        stored = _stored_format(checkpoint)
        if stored is not None and stored.is_executable:
            names += _names_of_8_bits(stored)
        if keeps_groups:
            names += _kept_types(checkpoint, stored, quantization)
    return " and ".join(dict.fromkeys(names)) or UNQUANTISED


def cpu_format(
    checkpoint: Checkpoint, quantization: Quantization, *, keeps_groups: bool
) -> CpuFormat:
    """How linear layers run on a CPU.

    Args:
        checkpoint: the model's files.
        quantization: the setting.
        keeps_groups: see `linear_format`.

    Raises:
        ConfigError: see `linear_format`.
    """
    check_setting(checkpoint, quantization)
    if quantization in _8_BITS:
        return CpuFormat(quantization, keeps_groups=False)
    if rounds_weights(checkpoint, quantization):
        return CpuFormat(_INT4, keeps_groups)
    stored = _stored_format(checkpoint)
    has_products = stored is not None and stored.is_executable
    return CpuFormat(
        "auto" if quantization == "auto" and has_products else "none",
        keeps_groups and quantization != "none",
    )


def rounds_weights(checkpoint: Checkpoint, quantization: Quantization) -> bool:
    """Whether the setting rounds weights to 4 bits, which changes what a model says. Folders of 4
    bits are left as they are, also the layers that they have in 16: their authors chose them. So
    are matrices of 4 bits in GGUF files.

    Raises:
        ConfigError: the files are corrupt.
    """
    if quantization != _INT4:
        return False
    if _is_file(checkpoint):
        return has_wider_layers(checkpoint.path)
    return _stored_format(checkpoint) is None


def kept_in_layers(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    shapes: Mapping[str, Shape],
    quantization: Quantization,
    *,
    keeps_groups: bool = True,
    bits_of: BitsOf = host_bits,
) -> KeptValues:
    """What linear layers keep in codes with scales of groups, the output layer excepted.

    Parts of fused layers that differ in format are counted although they are dequantised.

    Args:
        checkpoint: the model's files.
        spec: of the model.
        shapes: of its linear layers' weights, by name: `loader.linear_shapes`.
        quantization: the setting.
        keeps_groups: see `linear_format`.
        bits_of: bits per weight, `record_bits` on a GPU.

    Raises:
        ConfigError: the files are corrupt.
    """
    if not keeps_groups or quantization not in ("auto", _INT4):
        return KeptValues()
    rounds = rounds_weights(checkpoint, quantization)
    if _is_file(checkpoint):
        return kept_layers(checkpoint.path, spec.num_layers, rounds_others=rounds, bits_of=bits_of)
    if rounds:
        return rounded_layers(shapes.values(), bits_of)
    stored = _stored_format(checkpoint)
    if stored is None or not stored.layouts:
        return KeptValues()
    if checkpoint.random_weights:
        return drawn_experts(stored, shapes, bits_of)
    return kept_in_folder(checkpoint.path, stored, shapes, bits_of)


def kept_outside_layers(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    quantization: Quantization,
    *,
    keeps_groups: bool = True,
) -> KeptValues:
    """`kept_in_layers` of the embedding and the output layer, which count once if tied; folders
    have both in 16 or 32 bits."""
    if not keeps_groups or quantization not in ("auto", _INT4) or not _is_file(checkpoint):
        return KeptValues()
    return kept_embeddings(checkpoint.path, tied=spec.tie_word_embeddings)


def _kept_types(
    checkpoint: Checkpoint, stored: StoredFormat | None, quantization: Quantization
) -> list[str]:
    """Of what linear layers keep in groups, with a setting that lets them."""
    if rounds_weights(checkpoint, quantization):
        return [_INT4]
    if _is_file(checkpoint):
        return list(kept_layers(checkpoint.path).types)
    return [] if stored is None else stored.labels


def num_quantized(checkpoint: Checkpoint, spec: ModelSpec, quantization: Quantization) -> int:
    """How many values of a model's weights have 8 bits and scales of rows on a CPU.

    Parts of fused layers that differ in format are counted although they are dequantised.

    Args:
        checkpoint: the model's files.
        spec: of the model.
        quantization: the setting.

    Raises:
        ConfigError: see `linear_format`; or the files are corrupt.
    """
    name = linear_format(checkpoint, quantization, keeps_groups=False)
    if name == UNQUANTISED:
        return 0
    if quantization in _8_BITS:
        return spec.quantizable_elements
    return _num_stored(checkpoint, frozenset(_NAMES))


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


def _is_file(checkpoint: Checkpoint) -> bool:
    """Whether weights are read from a GGUF file."""
    return checkpoint.format == "gguf" and not checkpoint.random_weights


def _stored_format(checkpoint: Checkpoint) -> StoredFormat | None:
    if checkpoint.format == "gguf":
        return None
    found = format_of(checkpoint.path)
    return None if checkpoint.random_weights and not draws_codes(found) else found


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
