"""A checkpoint's tensors under their Hugging Face names, whatever the file format."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import gguf
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight.checkpoint import safetensors
from inflight.checkpoint.gguf import GgufFile, GgufTensor
from inflight.checkpoint.locate import Checkpoint
from inflight.checkpoint.safetensors import StoredTensor
from inflight.errors import ConfigError
from inflight.models.family import WHOLE_TENSORS
from inflight.models.quantization.folder import QuantizedWeights
from inflight.models.quantization.matrix import Matrix
from inflight.models.quantization.recognition import format_of
from inflight.models.registry import family_of
from inflight.models.spec import ModelSpec

Progress = Callable[[str, float], None]
Shape = tuple[int, ...]

# Blocks that gguf's numpy code processes at a time: its temporaries then stay in the CPU cache,
# eight times faster than its default of sixteen rows.
_BLOCKS_AT_ONCE = 4096
_ROWS_AT_ONCE = 16  # rows per group in gguf's code

_GGUF_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output_norm.bias": "model.norm.bias",
    "output.weight": "lm_head.weight",
}
_GGUF_SETTINGS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_GGUF_LAYER = re.compile(r"blk\.(\d{1,6})\.(\w+)\.(weight|bias)")


class Weights(Protocol):
    """Tensors read on demand; `read` is thread-safe."""

    shapes: dict[str, Shape]

    def read(self, name: str) -> Tensor:
        """In its stored dtype (float32 if quantised). May alias the file: do not write to it."""

    def read_matrix(self, name: str) -> Matrix:
        """As `read`, but a weight that the linear layers can use as it is stays quantised."""


def open_weights(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    expected: Mapping[str, Shape],
    device: torch.device | str = "cpu",
) -> Weights:
    """Open a checkpoint and compare its tensors with those that the model needs.

    Args:
        checkpoint: where.
        spec: its model.
        expected: name -> shape of every tensor that the model will read.
        device: where weights are drawn, if they are. On torch's meta device weights have shapes
            alone, and no tensor is read.

    Raises:
        ConfigError: a damaged file; missing or unexpected tensors, or shapes that differ, by name.
    """
    if torch.device(device).type == "meta":
        return EmptyWeights(expected, _quantized_weights(checkpoint))
    if checkpoint.random_weights:
        return RandomWeights(expected, device)
    weights: Weights
    if checkpoint.format == "gguf":
        weights = _GgufWeights(checkpoint.path, spec)
    else:
        weights = _folder_weights(checkpoint.path)
    ignored = {"lm_head.weight"} if spec.tie_word_embeddings else set()
    further = range(spec.num_layers, spec.num_layers + spec.num_nextn_layers)
    prefixes = tuple(f"{stem}.{index}." for index in further for stem in ("model.layers", "blk"))
    ignored |= {name for name in weights.shapes if prefixes and name.startswith(prefixes)}
    check_shapes(f"{checkpoint.path}: {spec.family}", weights.shapes, expected, ignored)
    return weights


def _quantized_weights(checkpoint: Checkpoint) -> QuantizedWeights | None:
    """Those of a folder with quantised weights."""
    if checkpoint.random_weights or checkpoint.format == "gguf":
        return None
    if format_of(checkpoint.path) is None:
        return None
    found = _folder_weights(checkpoint.path)
    return found if isinstance(found, QuantizedWeights) else None


def _folder_weights(path: Path) -> StoredWeights | QuantizedWeights:
    found = format_of(path)
    dtypes = safetensors.WEIGHTS if found is None else safetensors.WEIGHTS + safetensors.QUANTIZED
    stored = safetensors.read_folder(path, dtypes)
    # Old checkpoints contain the rotary frequencies, which follow from the config.
    kept = {name: stored[name] for name in stored if not name.endswith(".rotary_emb.inv_freq")}
    return StoredWeights(kept) if found is None else QuantizedWeights(kept, found, path)


def check_shapes(
    where: str,
    found: Mapping[str, Shape],
    expected: Mapping[str, Shape],
    ignored: Collection[str] = (),
) -> None:
    """Compare the tensors of a checkpoint with those that a model needs.

    Args:
        where: the checkpoint and the kind of model, for the error.
        found: name -> shape of the tensors in it.
        expected: name -> shape of the tensors needed.
        ignored: names that may be present but are not needed.

    Raises:
        ConfigError: missing or unexpected tensors, or wrong shapes, by name.
    """
    _refuse(where, "missing tensors", [name for name in expected if name not in found])
    _refuse(
        where,
        "unexpected tensors for this architecture",
        [name for name in found if name not in expected and name not in ignored],
    )
    _refuse(
        where,
        "tensors whose shape does not match the config",
        [
            f"{name} {list(found[name])}, expected {list(shape)}"
            for name, shape in expected.items()
            if found[name] != shape
        ],
    )


def _refuse(where: str, what: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise ConfigError(f"{where}: {what}: {', '.join(names[:3])}{more}")


class RandomWeights:
    """Normal with standard deviation 0.02, as at initialisation; norms 1, biases 0."""

    def __init__(self, shapes: Mapping[str, Shape], device: torch.device | str) -> None:
        self.shapes = dict(shapes)
        self._device = torch.device(device)

    def read(self, name: str) -> Tensor:
        shape = self.shapes[name]
        if name.endswith(".bias"):
            return torch.zeros(shape, device=self._device)
        if len(shape) == 1 or "norm" in name:
            return torch.ones(shape, device=self._device)
        # Seeded by name, so that the weights do not depend on the order or threads of reading.
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        drawn = torch.empty(shape, dtype=torch.bfloat16, device=self._device)
        return drawn.normal_(0.0, 0.02, generator=generator)

    def read_matrix(self, name: str) -> Matrix:
        return self.read(name)


class EmptyWeights:
    """Tensors on torch's meta device: shapes without memory.

    Args:
        shapes: by name.
        quantized: the weights of a folder whose formats they have; None if they are not quantised.
    """

    def __init__(
        self, shapes: Mapping[str, Shape], quantized: QuantizedWeights | None = None
    ) -> None:
        self.shapes = dict(shapes)
        self._quantized = quantized

    def read(self, name: str) -> Tensor:
        return torch.empty(self.shapes[name], device="meta")

    def read_matrix(self, name: str) -> Matrix:
        return self.read(name) if self._quantized is None else self._quantized.shaped_matrix(name)


class StoredWeights:
    """Tensors of safetensors files, under their stored names.

    Stacked matrices NAME.weight [E, n, k] are E tensors, NAME.N.weight [n, k].
    """

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        self._stored: dict[str, tuple[StoredTensor, int | None]] = {}
        self.shapes: dict[str, Shape] = {}
        for name, tensor in stored.items():
            if len(tensor.shape) != 3:
                self._stored[name] = tensor, None
                self.shapes[name] = tensor.shape
                continue
            for index in range(tensor.shape[0]):
                part = _name_in_stack(name, index)
                self._stored[part] = tensor, index
                self.shapes[part] = tensor.shape[1:]

    def read(self, name: str) -> Tensor:
        tensor, index = self._stored[name]
        return tensor.read() if index is None else tensor.read_part(index)

    def read_matrix(self, name: str) -> Matrix:
        return self.read(name)


def _name_in_stack(name: str, index: int) -> str:
    """Of one of the matrices that a tensor stacks."""
    stem, dot, suffix = name.rpartition(".")
    return f"{stem}.{index}{dot}{suffix}"


class _GgufWeights:
    """The tensors of a GGUF file under Hugging Face names.

    It stacks the matrices of experts, which are tensors of their own here. Tensors that are one in
    a folder are joined.
    """

    def __init__(self, path: Path, spec: ModelSpec) -> None:
        self._path = path
        parts: dict[str, list[tuple[int, GgufTensor]]] = {}
        slots = family_of(spec).tensors.values()
        names = {gguf_name: (at, name) for at, (name, gguf_name) in enumerate(slots)}
        whole = {
            gguf_name: name
            for slot, (name, gguf_name) in family_of(spec).tensors.items()
            if slot in WHOLE_TENSORS
        }
        for gguf_name, tensor in GgufFile(path).tensors.items():
            if gguf_name in _GGUF_SETTINGS:
                continue
            match = _GGUF_LAYER.fullmatch(gguf_name)
            if match and f"{match[2]}.{match[3]}" in whole:
                own_name = whole[f"{match[2]}.{match[3]}"]
                parts[f"model.layers.{int(match[1])}.{own_name}"] = [(0, tensor)]
                continue
            if not match or match[2] not in names:
                parts[_GGUF_NAMES.get(gguf_name, gguf_name)] = [(0, tensor)]
                continue
            if match[2] == "ffn_gate_inp_shexp" and len(tensor.shape) == 1:
                # Converters write this matrix of one row in either way.
                tensor = replace(tensor, shape=(1, *tensor.shape))
            at, own_name = names[match[2]]
            name = f"model.layers.{int(match[1])}.{own_name}.{match[3]}"
            if "{}" not in own_name or len(tensor.shape) != 3:
                parts.setdefault(name, []).append((at, tensor))
                continue
            for expert, matrix in enumerate(_unstacked(tensor)):
                parts.setdefault(name.format(expert), []).append((at, matrix))
        # In the order of the family's slots.
        self._stored = {
            name: [tensor for _, tensor in sorted(found, key=lambda part: part[0])]
            for name, found in parts.items()
        }
        self.shapes = {name: _joined_shape(found) for name, found in self._stored.items()}

    def read(self, name: str) -> Tensor:
        values = [self._dequantize(name, part) for part in self._stored[name]]
        joined = values[0] if len(values) == 1 else np.concatenate(values)
        return torch.from_numpy(joined.reshape(self.shapes[name]))

    def read_matrix(self, name: str) -> Matrix:
        return self.read(name)

    def _dequantize(self, name: str, stored: GgufTensor) -> npt.NDArray[np.float32]:
        _, block_bytes = gguf.GGML_QUANT_SIZES[stored.type]
        # One flat run of blocks, split into rows such that gguf's groups have the desired size.
        row_bytes = block_bytes * (_BLOCKS_AT_ONCE // _ROWS_AT_ONCE)
        whole = len(stored.data) // row_bytes * row_bytes
        parts = [stored.data[:whole].reshape(-1, row_bytes), stored.data[whole:].reshape(1, -1)]
        try:
            values = [gguf.dequantize(part, stored.type).ravel() for part in parts if part.size]
        except NotImplementedError:  # gguf has no list of the types that it decodes; it raises this
            raise ConfigError(
                f"{self._path}: the tensor {name!r} has the type {stored.type.name}, which the "
                "`gguf` package cannot read; convert the file to another type, such as Q8_0"
            ) from None
        flat = values[0] if len(values) == 1 else np.concatenate(values)
        # float32 is a read-only view of the file; torch needs a writable array.
        if not flat.flags.writeable:
            flat = flat.copy()
        return np.asarray(flat, np.float32).reshape(stored.shape)


def _unstacked(stack: GgufTensor) -> list[GgufTensor]:
    """The matrices of a stack [E, n, k]."""
    rows = stack.data.reshape(stack.shape[0], -1)
    return [GgufTensor(stack.shape[1:], stack.type, row) for row in rows]


def _joined_shape(parts: list[GgufTensor]) -> Shape:
    """Of tensors with equal columns, one below the other."""
    first, *others = (part.shape for part in parts)
    if any(other[1:] != first[1:] for other in others):
        return first  # which is not the expected one
    rows = first[0] + sum(other[0] for other in others) if others else first[0]
    return (rows, *first[1:])
