"""Safetensors reader for untrusted files, with the `safetensors` library.

The header is validated first, so that errors name the tensor and the remedy. Format:
https://huggingface.co/docs/safetensors. Eight bytes with the header's length, a JSON header, the
data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open
from torch import Tensor

from inflight.checkpoint import shards
from inflight.checkpoint.gguf import check_overlap
from inflight.errors import ConfigError

_ALIGNMENT = 8  # bytes
WEIGHTS = ("F32", "F16", "BF16")
"""Dtypes of weights."""
TABLES = ("I64", "I32", "BOOL")
"""Dtypes of id and bit tables."""
QUANTIZED = ("F8_E4M3", "I8", "U8", "I32", "I64")
"""Dtypes of quantised weights, and of what belongs to them."""
_ITEM_BYTES = {
    **dict.fromkeys(("F32", "I32"), 4),
    **dict.fromkeys(("F16", "BF16"), 2),
    **dict.fromkeys(("BOOL", "F8_E4M3", "I8", "U8"), 1),
    "I64": 8,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file.

    Attributes:
        shape: of the tensor.
        dtype: one of WEIGHTS, TABLES and QUANTIZED.
    """

    shape: tuple[int, ...]
    dtype: str
    _name: str
    _file: Any  # a safe_open, whose methods have no types

    def read(self) -> Tensor:
        """The tensor, a copy-on-write view into the mapped file. Thread-safe."""
        tensor: Tensor = self._file.get_tensor(self._name)
        # The format does not promise aligned data.
        return tensor.clone() if tensor.data_ptr() % _ALIGNMENT else tensor

    def read_part(self, index: int) -> Tensor:
        """A copy of one of the tensors along the first dimension. Thread-safe."""
        part: Tensor = self._file.get_slice(self._name)[index]
        return part


def read_folder(folder: Path, dtypes: Sequence[str] = WEIGHTS) -> dict[str, StoredTensor]:
    """All tensors of a Hugging Face folder: one model.safetensors, or the shards of its index.

    Args:
        folder: of the checkpoint.
        dtypes: the allowed ones.

    Raises:
        ConfigError: no such file, a corrupt one, a shard outside the folder, or an index that does
            not match the shards.
    """
    index = folder / shards.INDEX_NAME
    if not index.is_file():
        return read_file(shards.single_path(folder), dtypes)
    weight_map = shards.read_index(index)
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(weight_map.values())):
        path = shards.shard_path(folder, shard)
        for name, tensor in read_file(path, dtypes).items():
            if weight_map.get(name) != shard:
                raise ConfigError(
                    f"{path}: tensor {name!r} is not in this shard according to "
                    f"{shards.INDEX_NAME}; download the checkpoint again"
                )
            tensors[name] = tensor
    missing = sorted(weight_map.keys() - tensors.keys())
    if missing:
        raise ConfigError(
            f"{index}: lists {len(missing)} tensors that are in no shard, such as {missing[0]!r}; "
            "download the checkpoint again"
        )
    return tensors


def read_file(path: Path, dtypes: Sequence[str] = WEIGHTS) -> dict[str, StoredTensor]:
    """The tensors of one file, by name.

    Args:
        path: of the file.
        dtypes: the allowed ones.

    Raises:
        ConfigError: the header is invalid or does not match the file.
    """
    try:
        _check_header(path, dtypes)
        file: Any = safe_open(path, framework="pt")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None
    except SafetensorError as error:
        raise shards.broken(path, f"rejected by the safetensors library ({error})") from None
    tensors = {}
    for name in file.keys():  # noqa: SIM118 - a safe_open is no mapping
        stored = file.get_slice(name)
        tensors[name] = StoredTensor(tuple(stored.get_shape()), stored.get_dtype(), name, file)
    return tensors


def _check_header(path: Path, dtypes: Sequence[str]) -> None:
    """Validate the header's entries: format, supported dtypes, and the size of the file.

    Raises:
        ConfigError: an entry is invalid.
        OSError: the file cannot be read.
    """
    header, data_bytes = shards.read_header(path)
    spans = []
    for name, raw in header.items():
        if name == "__metadata__":
            continue
        dtype, shape, begin, end = _entry(path, raw, name)
        if dtype not in dtypes:
            raise ConfigError(
                f"{path}: the tensor {name!r} has the type {dtype}; allowed: {', '.join(dtypes)}"
            )
        if end > data_bytes:
            raise shards.broken(
                path, f"tensor {name!r} extends beyond the end of the file: truncated"
            )
        if end - begin != math.prod(shape) * _ITEM_BYTES[dtype]:
            raise shards.broken(
                path, f"the tensor {name!r} of shape {shape} has {end - begin} bytes"
            )
        spans.append((begin, end, name))
    check_overlap(path, spans)


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def _entry(path: Path, raw: Any, name: str) -> tuple[str, list[int], int, int]:
    try:
        entry = msgspec.convert(raw, _Entry)
    except msgspec.ValidationError as error:
        raise shards.broken(path, f"invalid entry for tensor {name!r} ({error})") from None
    begin, end = entry.data_offsets
    if min(entry.shape, default=0) < 0 or not 0 <= begin <= end:
        raise shards.broken(
            path, f"the tensor {name!r} has the shape {entry.shape} at {begin}:{end}"
        )
    return entry.dtype, entry.shape, begin, end
