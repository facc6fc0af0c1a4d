"""GGUF header parser for untrusted files: all sizes are checked against the file.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Arrays such as the vocabulary are
read on demand: no forward pass needs 100 000 Python strings.
"""

from __future__ import annotations

import itertools
import math
import mmap
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from inflight.errors import ConfigError

_VERSIONS = (2, 3)
_MAX_ENTRIES = 1 << 20
_MAX_DIMS = 4
_STRING, _ARRAY = 8, 9
_STRING_SIZE = struct.Struct("<Q")
# Value type -> struct format of one scalar.
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}


@dataclass(frozen=True, slots=True)
class GgufArray:
    """A metadata array; see `GgufFile.items`.

    Attributes:
        count: number of items.
        kind: of the items, as in the file.
        position: of the first item in the file, in bytes.
    """

    count: int
    kind: int = field(default=0, compare=False, repr=False)
    position: int = field(default=0, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One entry of the tensor table.

    Attributes:
        shape: slowest dimension first, as in numpy (reversed in the file).
        type: storage type; a GGMLQuantizationType.
        data: its bytes, a view into the mapped file.
    """

    shape: tuple[int, ...]
    type: Any
    data: npt.NDArray[np.uint8]


class GgufFile:
    """A memory-mapped GGUF file with a validated header.

    Attributes:
        path: of the file.
        metadata: scalars and strings by key; a GgufArray for each array.
        tensors: by name, in file order.

    Raises:
        ConfigError: not a GGUF file of version 2 or 3, truncated, or inconsistent.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise ConfigError(f"{path}: cannot be read ({error})") from None
        self._position = 0
        try:
            self._read()
        except (struct.error, UnicodeDecodeError) as error:
            raise self._broken(f"truncated or corrupt header ({error})") from None

    def items(self, array: GgufArray) -> list[Any]:
        """The items of an array of this file's metadata: numbers or strings.

        Raises:
            ConfigError: a string is not UTF-8.
        """
        if array.kind in _SCALARS:
            dtype = np.dtype(_SCALARS[array.kind])
            found = np.frombuffer(self._bytes, dtype, array.count, array.position)
            items: list[Any] = found.tolist()
            return items
        position, strings = array.position, []
        for _ in range(array.count):
            (size,) = _STRING_SIZE.unpack_from(self._bytes, position)
            position += _STRING_SIZE.size + size
            strings.append(self._bytes[position - size : position])
        try:
            return [string.decode("utf-8") for string in strings]
        except UnicodeDecodeError as error:
            raise self._broken(f"corrupt header ({error})") from None

    def _broken(self, what: str) -> ConfigError:
        return ConfigError(f"{self.path}: {what}; download the file again")

    def _read(self) -> None:
        if self._bytes[:4] != b"GGUF":
            raise self._broken("not a GGUF file")
        self._position = 4
        version = self._scalar("<I")
        if version not in _VERSIONS:
            raise ConfigError(
                f"{self.path}: GGUF version {version}; allowed: 2 and 3, little endian; "
                "convert it again with a current llama.cpp"
            )
        num_tensors, num_entries = self._scalar("<Q"), self._scalar("<Q")
        if max(num_tensors, num_entries) > _MAX_ENTRIES:
            raise self._broken(f"{num_tensors} tensors and {num_entries} metadata entries")
        for _ in range(num_entries):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("<I"))
        table = [self._tensor_entry() for _ in range(num_tensors)]
        self._map_tensors(table)

    def _scalar(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self._bytes, self._position)
        self._position += struct.calcsize(form)
        return value

    def _skip(self, size: int) -> None:
        self._position += size
        if self._position > len(self._bytes):
            raise self._broken("truncated header")

    def _string(self) -> str:
        size = self._scalar("<Q")
        begin = self._position
        self._skip(size)
        return self._bytes[begin : self._position].decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise self._broken(f"a metadata value of unknown type {kind}")
        return self._scalar(_SCALARS[kind])

    def _array(self) -> GgufArray:
        kind, count = self._scalar("<I"), self._scalar("<Q")
        begin = self._position
        if kind in _SCALARS:
            self._skip(count * struct.calcsize(_SCALARS[kind]))
        elif kind == _STRING:
            position, end = self._position, len(self._bytes)
            for _ in range(count):
                (size,) = _STRING_SIZE.unpack_from(self._bytes, position)
                position += _STRING_SIZE.size + size
                if position > end:
                    raise self._broken("truncated header")
            self._position = position
        else:
            raise self._broken(f"a metadata array of type {kind}")
        return GgufArray(count, kind, begin)

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dims = self._string(), self._scalar("<I")
        if num_dims > _MAX_DIMS:
            raise self._broken(f"tensor {name!r} has {num_dims} dimensions")
        shape = tuple(self._scalar("<Q") for _ in range(num_dims))[::-1]
        return name, shape, self._scalar("<I"), self._scalar("<Q")

    def _map_tensors(self, table: Iterable[tuple[str, tuple[int, ...], int, int]]) -> None:
        # Takes 60 ms to import, and Hugging Face folders do not need it.
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._broken(f"general.alignment is {alignment}, not a power of two")
        base = -(-self._position // alignment) * alignment
        everything = np.frombuffer(self._bytes, np.uint8)
        spans = []
        for name, shape, type_id, offset in table:
            try:
                kind = GGMLQuantizationType(type_id)
            except ValueError:
                raise ConfigError(
                    f"{self.path}: tensor {name!r} has the unknown type {type_id}; "
                    "a newer `gguf` package may support it"
                ) from None
            block_len, block_bytes = GGML_QUANT_SIZES[kind]
            if not shape or shape[-1] % block_len:
                raise self._broken(f"tensor {name!r} has rows of {shape[-1:]} {kind.name}")
            begin = base + offset
            end = begin + math.prod(shape) // block_len * block_bytes
            if offset % alignment or end > len(everything):
                raise self._broken(f"tensor {name!r} extends beyond the end of the file: truncated")
            if name in self.tensors:
                raise self._broken(f"duplicate tensor {name!r}")
            spans.append((begin, end, name))
            self.tensors[name] = GgufTensor(shape, kind, everything[begin:end])
        check_overlap(self.path, spans)


def check_overlap(path: Path, spans: list[tuple[int, int, str]]) -> None:
    """Raise ConfigError if tensors share bytes; spans are (begin, end, name), end exclusive."""
    spans = sorted(span for span in spans if span[0] < span[1])
    for (_, end, name), (begin, _, following) in itertools.pairwise(spans):
        if begin < end:
            raise ConfigError(
                f"{path}: tensors {name!r} and {following!r} overlap; download the file again"
            )
