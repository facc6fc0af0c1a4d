"""The tensors of a GGUF file under Hugging Face names."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight.checkpoint.gguf import GgufFile, GgufTensor
from inflight.errors import ConfigError
from inflight.models.family import WHOLE_TENSORS, Family
from inflight.models.quantization.gguf.kinds import KINDS, BlockKind
from inflight.models.quantization.grouped import concatenated
from inflight.models.quantization.matrix import Matrix
from inflight.models.stored.gguf_blocks import grouped, shaped
from inflight.models.stored.stack import is_stack

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


class GgufWeights:
    """The tensors of a GGUF file under Hugging Face names.

    It stacks the matrices of experts, which are tensors of their own here. Tensors that are one in
    a folder are joined.
    """

    def __init__(self, path: Path, family: Family) -> None:
        self._path = path
        parts: dict[str, list[tuple[int, GgufTensor]]] = {}
        slots = family.tensors.values()
        names = {gguf_name: (at, name) for at, (name, gguf_name) in enumerate(slots)}
        whole = {
            gguf_name: name
            for slot, (name, gguf_name) in family.tensors.items()
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
            num_dims = 2 if match[3] == "bias" else 3
            if "{}" not in own_name or not is_stack(tensor.shape, num_dims):
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
        """In codes of 4 to 8 bits, exactly; as `read` where the file has 16 or 32 bits, parts in
        types of several kinds, or scales that are not finite."""
        if self._kind(name) is None:
            return self.read(name)
        parts = [part for part in map(grouped, self._stored[name]) if part is not None]
        return concatenated(parts) if len(parts) == len(self._stored[name]) else self.read(name)

    def shaped_matrix(self, name: str) -> Matrix:
        """`read_matrix` on the meta device, as if all scales were finite."""
        kind = self._kind(name)
        if kind is None:
            return torch.empty(self.shapes[name], device="meta")
        return shaped(self.shapes[name], kind)

    def _kind(self, name: str) -> BlockKind | None:
        """Of all parts of a matrix; None if it is dequantised."""
        kinds = {KINDS.get(part.type.name) for part in self._stored[name]}
        return kinds.pop() if len(kinds) == 1 and len(self.shapes[name]) == 2 else None

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
    """The matrices of a stack [E, n, k], or the vectors of one [E, n]."""
    rows = stack.data.reshape(stack.shape[0], -1)
    return [GgufTensor(stack.shape[1:], stack.type, row) for row in rows]


def _joined_shape(parts: list[GgufTensor]) -> Shape:
    """Of tensors with equal columns, one below the other."""
    first, *others = (part.shape for part in parts)
    if any(other[1:] != first[1:] for other in others):
        return first  # which is not the expected one
    rows = first[0] + sum(other[0] for other in others) if others else first[0]
    return (rows, *first[1:])
