"""Safetensors reader for untrusted files, with the `safetensors` library.

The header is validated first, so that errors name the tensor and the remedy. Format:
https://huggingface.co/docs/safetensors. Eight bytes with the header's length, a JSON header, the
data.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open
from torch import Tensor

from inflight.checkpoint.gguf import check_overlap
from inflight.errors import ConfigError

MAX_HEADER_BYTES = 100_000_000
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_ALIGNMENT = 8  # bytes
# Supported dtypes of weights -> bytes per element.
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
# Supported dtypes of id and bit tables.
_TABLE_BYTES = {"I64": 8, "I32": 4, "BOOL": 1}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file.

    Attributes:
        shape: of the tensor.
        dtype: "F32", "F16" or "BF16"; for tables also "I64", "I32" or "BOOL".
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


def read_folder(folder: Path, tables: bool = False) -> dict[str, StoredTensor]:
    """All tensors of a Hugging Face folder: one model.safetensors, or the shards of its index.

    Args:
        folder: of the checkpoint.
        tables: whether id and bit tables are allowed beside the weights.

    Raises:
        ConfigError: no such file, a corrupt one, a shard outside the folder, or an index that does
            not match the shards.
    """
    index = folder / INDEX_NAME
    if not index.is_file():
        single = folder / SINGLE_NAME
        if not single.is_file():
            raise ConfigError(
                f"{folder}: neither {SINGLE_NAME} nor {INDEX_NAME} exists; other weight formats "
                "are not supported: convert the weights to safetensors"
            )
        return read_file(single, tables)
    weight_map = _read_index(index)
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(weight_map.values())):
        path = _shard_path(folder, shard)
        for name, tensor in read_file(path, tables).items():
            if weight_map.get(name) != shard:
                raise ConfigError(
                    f"{path}: tensor {name!r} is not in this shard according to {INDEX_NAME}; "
                    "download the checkpoint again"
                )
            tensors[name] = tensor
    missing = sorted(weight_map.keys() - tensors.keys())
    if missing:
        raise ConfigError(
            f"{index}: lists {len(missing)} tensors that are in no shard, such as {missing[0]!r}; "
            "download the checkpoint again"
        )
    return tensors


def _read_index(index: Path) -> dict[str, str]:
    class Index(msgspec.Struct):
        weight_map: dict[str, str]

    try:
        return msgspec.json.decode(index.read_bytes(), type=Index).weight_map
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{index}: not a valid index ({error})") from None


def _shard_path(folder: Path, shard: str) -> Path:
    path = (folder / shard).resolve()
    home = folder.resolve()
    allowed = [home]
    if home.parent.name == "snapshots":  # the Hub's cache links snapshots to blobs
        allowed.append(home.parent.parent / "blobs")
    if not any(path.is_relative_to(parent) for parent in allowed):
        raise ConfigError(
            f"{folder / INDEX_NAME}: shard {shard!r} is outside the folder, at {path}"
        )
    if not path.is_file():
        raise ConfigError(f"{path}: listed in {INDEX_NAME}, but does not exist")
    return path


def read_file(path: Path, tables: bool = False) -> dict[str, StoredTensor]:
    """The tensors of one file, by name.

    Args:
        path: of the file.
        tables: see `read_folder`.

    Raises:
        ConfigError: the header is invalid or does not match the file.
    """
    try:
        _check_header(path, tables)
        file: Any = safe_open(path, framework="pt")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None
    except SafetensorError as error:
        raise _broken(path, f"rejected by the safetensors library ({error})") from None
    tensors = {}
    for name in file.keys():  # noqa: SIM118 - a safe_open is no mapping
        stored = file.get_slice(name)
        tensors[name] = StoredTensor(tuple(stored.get_shape()), stored.get_dtype(), name, file)
    return tensors


def _broken(path: Path, what: str) -> ConfigError:
    return ConfigError(f"{path}: {what}; download the file again")


def _check_header(path: Path, tables: bool) -> None:
    """Validate the header's entries: format, supported dtypes, and the size of the file.

    Raises:
        ConfigError: an entry is invalid.
        OSError: the file cannot be read.
    """
    header, data_bytes = _read_header(path)
    item_bytes = _ITEM_BYTES | (_TABLE_BYTES if tables else {})
    spans = []
    for name, raw in header.items():
        if name == "__metadata__":
            continue
        dtype, shape, begin, end = _entry(path, raw, name)
        if dtype not in item_bytes:
            raise ConfigError(
                f"{path}: the tensor {name!r} has the type {dtype}; allowed: "
                f"{', '.join(item_bytes)}"
            )
        if end > data_bytes:
            raise _broken(path, f"tensor {name!r} extends beyond the end of the file: truncated")
        if end - begin != math.prod(shape) * item_bytes[dtype]:
            raise _broken(path, f"the tensor {name!r} of shape {shape} has {end - begin} bytes")
        spans.append((begin, end, name))
    check_overlap(path, spans)


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a file, and the number of data bytes after it."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < 8:
            raise _broken(path, f"{size} bytes are not a safetensors file")
        header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > min(MAX_HEADER_BYTES, size - 8):
            raise _broken(
                path,
                f"a header of {header_bytes} bytes in a file of {size}; allowed: "
                f"{MAX_HEADER_BYTES}",
            )
        text = file.read(header_bytes)
    try:
        header = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _broken(path, f"the header is not valid JSON ({error})") from None
    if not isinstance(header, dict):
        raise _broken(path, "the header is not a JSON object")
    return header, size - 8 - header_bytes


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def _entry(path: Path, raw: Any, name: str) -> tuple[str, list[int], int, int]:
    try:
        entry = msgspec.convert(raw, _Entry)
    except msgspec.ValidationError as error:
        raise _broken(path, f"invalid entry for tensor {name!r} ({error})") from None
    begin, end = entry.data_offsets
    if min(entry.shape, default=0) < 0 or not 0 <= begin <= end:
        raise _broken(path, f"the tensor {name!r} has the shape {entry.shape} at {begin}:{end}")
    return entry.dtype, entry.shape, begin, end
