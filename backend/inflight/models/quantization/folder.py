"""Weights of a quantised Hugging Face folder.

A quantised weight `x.weight` [n, k] has its scales beside it, in `x.weight_scale` or
`x.weight_scale_inv`, by which it is multiplied despite the latter's name. Scales of activations and
of the KV cache are not needed: activations are quantised by their own magnitude, if at all, and the
cache keeps its 16 or 32 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from inflight.checkpoint.safetensors import StoredTensor
from inflight.errors import ConfigError
from inflight.models.quantization.matrix import Matrix, QuantizedMatrix
from inflight.models.quantization.recognition import FP8, INT8, StoredFormat

_TORCH_DTYPES = {FP8: torch.float8_e4m3fn, INT8: torch.int8}

_SCALES = ("weight_scale", "weight_scale_inv")
# Of activations, as quantised products need them, and of keys and values.
_UNUSED = (
    *("input_scale", "output_scale", "input_global_scale"),
    *("k_scale", "v_scale", "q_scale", "prob_output_scale", "kv_scale"),
)


class QuantizedWeights:
    """Tensors of safetensors files under their stored names, some of them quantised.

    Args:
        stored: by name.
        found: the format of the quantised ones.
        path: of the folder, for errors.

    Attributes:
        shapes: of the tensors without those that quantisation added.

    Raises:
        ConfigError: a quantised tensor without scales, with scales of another shape, or whose type
            is not that of the format.
    """

    def __init__(self, stored: Mapping[str, StoredTensor], found: StoredFormat, path: Path) -> None:
        self._stored = stored
        self._path = path
        self._scales: dict[str, StoredTensor] = {}
        self._found = found
        self._block = found.block
        for name, tensor in stored.items():
            if tensor.dtype in ("F32", "F16", "BF16"):
                continue
            if tensor.dtype not in found.dtypes or not name.endswith(".weight"):
                raise ConfigError(
                    f"{path}: the tensor {name!r} has the type {tensor.dtype}; config.json names "
                    f"the format {found.name}, in which weights have {_either(found)}"
                )
            self._scales[name] = self._find_scale(name, tensor)
        consumed = {
            f"{name.removesuffix('weight')}{suffix}" for name in self._scales for suffix in _SCALES
        }
        self.shapes = {
            name: tensor.shape
            for name, tensor in stored.items()
            if name not in consumed and name.rpartition(".")[2] not in _UNUSED
        }

    def read(self, name: str) -> Tensor:
        """In its stored dtype, or float32 if it is quantised.

        Raises:
            ConfigError: a scale is not a finite number.
        """
        values, scale = self._stored[name].read(), self._scales.get(name)
        if scale is None:
            return values
        return dequantize(values, self._factors(name, scale), self._block)

    def read_matrix(self, name: str) -> Matrix:
        """The weight of a linear layer as it is stored; with scales of blocks, as `read`.

        Raises:
            ConfigError: a scale is not a finite number.
        """
        scale = self._scales.get(name)
        if scale is None or self._block is not None:
            return self.read(name)
        values, factors = self._stored[name].read(), self._factors(name, scale)
        return QuantizedMatrix(values, factors.flatten().expand(len(values)).contiguous())

    def shaped_matrix(self, name: str) -> Matrix:
        """`read_matrix` on the meta device."""
        shape, scale = self._stored[name].shape, self._scales.get(name)
        if scale is None or self._block is not None:
            return torch.empty(shape, device="meta")
        dtype = _TORCH_DTYPES[self._stored[name].dtype]
        return QuantizedMatrix(
            torch.empty(shape, dtype=dtype, device="meta"), torch.empty(shape[0], device="meta")
        )

    def _factors(self, name: str, scale: StoredTensor) -> Tensor:
        factors = scale.read().to(torch.float32)
        if not factors.isfinite().all():
            raise ConfigError(f"{self._path}: scales of {name!r} are not finite")
        return factors

    def _find_scale(self, name: str, tensor: StoredTensor) -> StoredTensor:
        module = name.removesuffix("weight")
        scale = next(
            (self._stored[module + each] for each in _SCALES if module + each in self._stored), None
        )
        if scale is None:
            raise ConfigError(
                f"{self._path}: the tensor {name!r} is quantised ({tensor.dtype}) and has no "
                f"scales; expected {module}{_SCALES[0]}; download the checkpoint again"
            )
        allowed = _scale_shapes(tensor.shape, self._block)
        if scale.shape not in allowed:
            shown = " or ".join(str(list(shape)) for shape in allowed)
            raise ConfigError(
                f"{self._path}: the scales of {name!r} {list(tensor.shape)} have the shape "
                f"{list(scale.shape)}; expected {shown}"
            )
        return scale


def dequantize(values: Tensor, scale: Tensor, block: tuple[int, int] | None) -> Tensor:
    """values * scale in float32.

    Args:
        values: [n, k], 8 bits each.
        scale: float32: one for all values, [n] or [n, 1] for each row, or, with blocks,
            [ceil(n / rows), ceil(k / columns)].
        block: rows and columns of a block.
    """
    wide = values.to(torch.float32)
    if block is None:
        return wide.mul_(scale.view(-1, 1))
    n, k = values.shape
    rows, columns = block
    by_row = scale.repeat_interleave(columns, 1)[:, :k]
    return wide.mul_(by_row.repeat_interleave(rows, 0)[:n])


def _scale_shapes(
    shape: tuple[int, ...], block: tuple[int, int] | None
) -> tuple[tuple[int, ...], ...]:
    if len(shape) != 2:
        return ()
    n, k = shape
    if block is not None:
        return ((-(-n // block[0]), -(-k // block[1])),)
    return ((n, 1), (n,), (1,), (), (1, 1))


def _either(found: StoredFormat) -> str:
    return " or ".join(sorted(found.dtypes))
