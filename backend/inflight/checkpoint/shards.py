"""The files of a folder's safetensors: their index, shards and headers, read without torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from inflight.errors import ConfigError

MAX_HEADER_BYTES = 100_000_000
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


def check_files(folder: Path) -> None:
    """Check that all files of the weights exist and are whole, by their headers.

    Raises:
        ConfigError: one is missing, truncated or not a safetensors file, or lacks a tensor of the
            index.
    """
    index = folder / INDEX_NAME
    if not index.is_file():
        _names_in(single_path(folder))
        return
    weight_map = read_index(index)
    for shard in sorted(set(weight_map.values())):
        path = shard_path(folder, shard)
        found = _names_in(path)
        missing = [name for name, of in weight_map.items() if of == shard and name not in found]
        if missing:
            raise broken(path, f"the tensor {missing[0]!r} of {INDEX_NAME} is not in it")


def _names_in(path: Path) -> set[str]:
    """Names of the tensors of a file. Raises ConfigError: see `check_files`."""
    try:
        header, data_bytes = read_header(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    header.pop("__metadata__", None)
    for name, entry in header.items():
        offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
        if not isinstance(offsets, list) or not all(isinstance(one, int) for one in offsets):
            raise broken(path, f"invalid entry for tensor {name!r}")
        if max(offsets, default=0) > data_bytes:
            raise broken(path, f"tensor {name!r} extends beyond the end of the file: truncated")
    return set(header)


def weight_files(folder: Path) -> list[Path]:
    """The files of a folder's weights. Raises ConfigError: there are none, or a bad index."""
    index = folder / INDEX_NAME
    if not index.is_file():
        return [single_path(folder)]
    return [shard_path(folder, shard) for shard in sorted(set(read_index(index).values()))]


def single_path(folder: Path) -> Path:
    """The only file of weights. Raises ConfigError: it does not exist."""
    single = folder / SINGLE_NAME
    if not single.is_file():
        raise ConfigError(
            f"{folder}: neither {SINGLE_NAME} nor {INDEX_NAME} exists; other weight formats "
            "are not supported: convert the weights to safetensors"
        )
    return single


def read_index(index: Path) -> dict[str, str]:
    """The shard of each tensor. Raises ConfigError: the index is not valid."""

    class Index(msgspec.Struct):
        weight_map: dict[str, str]

    try:
        return msgspec.json.decode(index.read_bytes(), type=Index).weight_map
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{index}: not a valid index ({error})") from None


def shard_path(folder: Path, shard: str) -> Path:
    """The file of a shard. Raises ConfigError: it does not exist, or is outside the folder."""
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


def broken(path: Path, what: str) -> ConfigError:
    return ConfigError(f"{path}: {what}; download the file again")


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a file, and the number of data bytes after it.

    Raises:
        ConfigError: it is not that of a safetensors file.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < 8:
            raise broken(path, f"{size} bytes are not a safetensors file")
        header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > min(MAX_HEADER_BYTES, size - 8):
            raise broken(
                path,
                f"a header of {header_bytes} bytes in a file of {size}; allowed: "
                f"{MAX_HEADER_BYTES}",
            )
        text = file.read(header_bytes)
    try:
        header = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise broken(path, f"the header is not valid JSON ({error})") from None
    if not isinstance(header, dict):
        raise broken(path, "the header is not a JSON object")
    return header, size - 8 - header_bytes
