"""A checkpoint's tensors under their Hugging Face names, whatever the file format."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from inflight.checkpoint import safetensors
from inflight.checkpoint.locate import Checkpoint
from inflight.checkpoint.safetensors import StoredTensor
from inflight.errors import ConfigError
from inflight.models.family import Family
from inflight.models.quantization.folder import QuantizedWeights
from inflight.models.quantization.grouped import GroupedMatrix
from inflight.models.quantization.layouts.floats import E2M1
from inflight.models.quantization.layouts.folder import find_matrices
from inflight.models.quantization.matrix import Matrix
from inflight.models.quantization.recognition import draws_codes, format_of
from inflight.models.registry import family_of
from inflight.models.spec import ModelSpec
from inflight.models.stored.gguf_weights import GgufWeights
from inflight.models.stored.grouped_weights import GroupedWeights
from inflight.models.stored.stack import is_stack
from inflight.models.stored.transposed_experts import TransposedExperts
from inflight.models.stored.up_projections import JoinedUpProjections

Progress = Callable[[str, float], None]
Shape = tuple[int, ...]


class Weights(Protocol):
    """Tensors read on demand; `read` is thread-safe."""

    shapes: dict[str, Shape]

    def read(self, name: str) -> Tensor:
        """In its stored dtype (float32 if quantised). May alias the file: do not write to it."""

    def read_matrix(self, name: str) -> Matrix:
        """As `read`, but a weight that the linear layers can use as it is stays quantised."""


class ShapedWeights(Protocol):
    """Tensors whose formats are known without reading them."""

    def shaped_matrix(self, name: str) -> Matrix:
        """`Weights.read_matrix` on the meta device."""


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
        return EmptyWeights(expected, _shaped_weights(checkpoint, family_of(spec), expected))
    if checkpoint.random_weights:
        return _random_weights(checkpoint, expected, device)
    weights: Weights
    if checkpoint.format == "gguf":
        weights = _file_weights(checkpoint.path, family_of(spec))
    else:
        weights = _folder_weights(checkpoint.path, family_of(spec))
    ignored = {"lm_head.weight"} if spec.tie_word_embeddings else set()
    further = range(spec.num_layers, spec.num_layers + spec.num_nextn_layers)
    prefixes = tuple(f"{stem}.{index}." for index in further for stem in ("model.layers", "blk"))
    ignored |= {name for name in weights.shapes if prefixes and name.startswith(prefixes)}
    if isinstance(weights, GroupedWeights):
        ignored |= weights.spare_biases(expected)
    check_shapes(f"{checkpoint.path}: {spec.family}", weights.shapes, expected, ignored)
    return weights


def _random_weights(
    checkpoint: Checkpoint, expected: Mapping[str, Shape], device: torch.device | str
) -> RandomWeights:
    drawn = checkpoint.format != "gguf" and draws_codes(format_of(checkpoint.path))
    return (RandomMxfp4 if drawn else RandomWeights)(expected, device)


def _shaped_weights(
    checkpoint: Checkpoint, family: Family, expected: Mapping[str, Shape]
) -> ShapedWeights | None:
    """Those of a file, of a folder with quantised weights, or drawn in codes."""
    if checkpoint.random_weights:
        drawn = _random_weights(checkpoint, expected, "meta")
        return drawn if isinstance(drawn, RandomMxfp4) else None
    if checkpoint.format == "gguf":
        return _file_weights(checkpoint.path, family)
    if format_of(checkpoint.path) is None:
        return None
    found = _folder_weights(checkpoint.path, family)
    return found if isinstance(found, QuantizedWeights | GroupedWeights) else None


def _file_weights(path: Path, family: Family) -> GgufWeights | JoinedUpProjections:
    file = GgufWeights(path, family)
    return JoinedUpProjections(file) if "kv_b" in family.tensors else file


def _folder_weights(path: Path, family: Family) -> Weights:
    found = format_of(path)
    dtypes = safetensors.WEIGHTS if found is None else safetensors.WEIGHTS + safetensors.QUANTIZED
    stored = safetensors.read_folder(path, dtypes)
    # Old checkpoints contain the rotary frequencies, which follow from the config.
    kept = {name: stored[name] for name in stored if not name.endswith(".rotary_emb.inv_freq")}
    is_transposed = "huggingface" in family.transposed_experts
    if found is None:
        return TransposedExperts(kept) if is_transposed else StoredWeights(kept)
    if not found.layouts:
        return QuantizedWeights(kept, found, path)
    matrices, rest = find_matrices(kept, found.layouts, found.dtypes, path)
    if is_transposed and not found.dtypes:
        return GroupedWeights(matrices, TransposedExperts(rest), path)
    return GroupedWeights(matrices, QuantizedWeights(rest, found, path), path)


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


class RandomMxfp4(RandomWeights):
    """The same, with experts of codes with scales of groups, as folders in MXFP4 have them."""

    _GROUP = 32
    # Uniformly drawn codes have a standard deviation of 2.93.
    _SCALE = 2.0**-7

    def read_matrix(self, name: str) -> Matrix:
        if not self._is_in_codes(name):
            return self.read(name)
        n, k = self.shapes[name]
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        codes = torch.empty(n, k, dtype=torch.uint8, device=self._device)
        codes.random_(0, 16, generator=generator)
        scales = torch.full((n, k // self._GROUP), self._SCALE, device=self._device)
        return GroupedMatrix(codes, 4, scales, levels=E2M1)

    def shaped_matrix(self, name: str) -> Matrix:
        """`read_matrix` on the meta device."""
        if not self._is_in_codes(name):
            return torch.empty(self.shapes[name], device="meta")
        n, k = self.shapes[name]
        codes = torch.empty(n, k, dtype=torch.uint8, device="meta")
        scales = torch.empty(n, k // self._GROUP, device="meta")
        return GroupedMatrix(codes, 4, scales, levels=E2M1)

    def _is_in_codes(self, name: str) -> bool:
        return ".experts." in name and name.endswith(".weight")


class EmptyWeights:
    """Tensors on torch's meta device: shapes without memory.

    Args:
        shapes: by name.
        stored: the weights whose formats they have; None if they are not quantised.
    """

    def __init__(self, shapes: Mapping[str, Shape], stored: ShapedWeights | None = None) -> None:
        self.shapes = dict(shapes)
        self._stored = stored

    def read(self, name: str) -> Tensor:
        return torch.empty(self.shapes[name], device="meta")

    def read_matrix(self, name: str) -> Matrix:
        return self.read(name) if self._stored is None else self._stored.shaped_matrix(name)


class StoredWeights:
    """Tensors of safetensors files, under their stored names.

    Stacked matrices NAME.weight [E, n, k] are E tensors, NAME.N.weight [n, k].
    """

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        self._stored: dict[str, tuple[StoredTensor, int | None]] = {}
        self.shapes: dict[str, Shape] = {}
        for name, tensor in stored.items():
            if not is_stack(tensor.shape, 3):
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
