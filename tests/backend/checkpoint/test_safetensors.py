"""A safetensors file is accepted only if its header and its data are consistent."""

from __future__ import annotations

import json
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import tiny
from inflight.checkpoint import shards
from inflight.checkpoint.safetensors import TABLES, WEIGHTS, read_file, read_folder
from inflight.errors import ConfigError


def write(path: Path, header: Any, data: bytes = b"\0" * 64, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_a_file_of_the_official_writer_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5).bfloat16()}, path)
    tensors = read_file(path)
    assert {name: (t.shape, t.dtype) for name, t in tensors.items()} == {
        "a": ((2, 3), "F32"),
        "b": ((5,), "BF16"),
    }
    assert tensors["a"].read().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert tensors["b"].read().dtype == torch.bfloat16


def test_a_tensor_is_a_private_view_into_the_mapped_file(tmp_path: Path) -> None:
    """Loading a model copies nothing, and writing to a tensor does not change its file."""
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.arange(1 << 16), "b": torch.zeros(3).half()}, path)
    stored = read_file(path, (*WEIGHTS, *TABLES))["a"]
    first, second = stored.read(), stored.read()
    assert first.data_ptr() == second.data_ptr()
    private = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if path.name in line and line.split()[1].endswith("p"):
            begin, end = (int(address, 16) for address in line.split()[0].split("-"))
            private.append(range(begin, end))
    assert any(first.data_ptr() in addresses for addresses in private)
    before = path.read_bytes()
    first[0] = 7
    del stored, second
    assert first[:3].tolist() == [7, 1, 2]
    assert path.read_bytes() == before


def test_a_tensor_at_an_odd_address_is_moved_to_an_even_one(tmp_path: Path) -> None:
    header = json.dumps({"a": entry(0, 8, [2])}).encode()
    header += b" " * (7 - len(header) % 8)
    path = write(tmp_path / "x.safetensors", header, struct.pack("<2f", 1.5, -2.0))
    tensor = read_file(path)["a"].read()
    assert tensor.tolist() == [1.5, -2.0]
    assert tensor.data_ptr() % 8 == 0


def test_threads_read_from_one_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({f"t{i}": torch.full((1000,), float(i)) for i in range(64)}, path)
    tensors = read_file(path)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: tensors[f"t{i % 64}"].read(), range(512)))
    assert all(bool((tensor == i % 64).all()) for i, tensor in enumerate(found))


@pytest.mark.parametrize(
    ("header", "size"),
    [
        pytest.param({"a": entry(0, 32, [8]), "b": entry(36, 64, [7])}, 64, id="a hole"),
        pytest.param({"a": entry(4, 64, [15])}, 64, id="a hole in front"),
        pytest.param({"a": entry(0, 64, [16])}, 65, id="a byte too many"),
        pytest.param({"a": entry(0, 64, [16]), "__metadata__": {"x": 1}}, 64, id="metadata"),
    ],
)
def test_errors_of_the_library_are_raised(tmp_path: Path, header: Any, size: int) -> None:
    path = write(tmp_path / "x.safetensors", header, b"\0" * size)
    with pytest.raises(
        ConfigError, match=r"rejected by the safetensors library \(.+\); download the file again"
    ):
        read_file(path)


def test_a_tensor_named_twice_has_one_shape(tmp_path: Path) -> None:
    """What is checked is what is read: both take the last entry of a name."""
    first, second = (json.dumps(entry(0, 64, shape)) for shape in ([2, 8], [16]))
    header = f'{{"a": {first}, "a": {second}}}'.encode()
    stored = read_file(write(tmp_path / "x.safetensors", header))["a"]
    assert stored.shape == stored.read().shape == (16,)


@pytest.mark.parametrize(
    ("header", "named"),
    [
        (b"{", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        ([], "not a JSON object"),
        ({"a": entry(0, 64, [17])}, "of shape [17] has 64 bytes"),
        ({"a": entry(0, 65, [16])}, "extends beyond the end of the file"),
        ({"a": entry(0, 1 << 62, [1 << 60])}, "extends beyond the end of the file"),
        ({"a": entry(8, 4, [0])}, "at 8:4"),
        ({"a": entry(-4, 0, [1])}, "at -4:0"),
        ({"a": entry(0, 8, [-2, -1])}, "shape [-2, -1]"),
        ({"a": entry(0, 8, [2], "I64")}, "type I64; allowed: F32, F16, BF16"),
        ({"a": {"dtype": "F32", "shape": [1]}}, "invalid entry for tensor 'a'"),
        (
            {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}},
            "invalid entry for tensor 'a'",
        ),
        ({"a": [1]}, "invalid entry for tensor 'a'"),
        ({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, "'a' and 'b' overlap"),
        ({"a": entry(0, 32, [8]), "b": entry(8, 12, [1])}, "'a' and 'b' overlap"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(tmp_path: Path, header: Any, named: str) -> None:
    path = write(tmp_path / "x.safetensors", header)
    with pytest.raises(ConfigError) as caught:
        read_file(path)
    assert named in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("length", [1000, shards.MAX_HEADER_BYTES + 1, (1 << 64) - 1])
def test_a_header_longer_than_the_file_or_the_limit_is_not_read(
    tmp_path: Path, length: int
) -> None:
    with pytest.raises(ConfigError, match=f"a header of {length} bytes"):
        read_file(write(tmp_path / "x.safetensors", {}, length=length))


@pytest.mark.parametrize("size", [0, 7])
def test_a_file_too_short_for_a_header_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"\0" * size)
    with pytest.raises(ConfigError, match=f"{size} bytes are not a safetensors file"):
        read_file(path)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    checkpoint = tiny.write_llama(tmp_path)
    file = tmp_path / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(ConfigError, match="truncated; download the file again"):
        read_folder(checkpoint.path)


def test_shards_are_read_as_one(tmp_path: Path) -> None:
    tiny.write_llama(tmp_path / "whole")
    tiny.write_llama(tmp_path / "shards", shards=3)
    whole, parts = read_folder(tmp_path / "whole"), read_folder(tmp_path / "shards")
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name].read(), parts[name].read()) for name in whole)


def index(folder: Path, weight_map: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / shards.INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("through", ["..", "absolute", "link"])
def test_a_shard_outside_the_folder_is_refused(tmp_path: Path, through: str) -> None:
    outside = write(tmp_path / "outside.safetensors", {"a": entry(0, 64, [16])})
    folder = tmp_path / "model"
    folder.mkdir()
    shard = {"..": "../outside.safetensors", "absolute": str(outside), "link": "link"}[through]
    (folder / "link").symlink_to(outside)
    with pytest.raises(ConfigError, match="is outside the folder"):
        read_folder(index(folder, {"a": shard}))


def test_a_download_caches_links_to_its_blobs_are_followed(tmp_path: Path) -> None:
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir(parents=True)
    write(blobs / "0123", {"a": entry(0, 64, [16])})
    folder = tmp_path / "models--a--b" / "snapshots" / "main"
    folder.mkdir(parents=True)
    (folder / "model-1.safetensors").symlink_to(blobs / "0123")
    assert list(read_folder(index(folder, {"a": "model-1.safetensors"}))) == ["a"]


@pytest.mark.parametrize(
    ("weight_map", "named"),
    [
        ({"a": "missing.safetensors"}, "does not exist"),
        ({"a": "x.safetensors", "b": "x.safetensors"}, "'b'"),
        ({"a": 5}, "not a valid index"),
    ],
)
def test_an_index_that_does_not_agree_is_refused(
    tmp_path: Path, weight_map: Any, named: str
) -> None:
    write(tmp_path / "x.safetensors", {"a": entry(0, 64, [16])})
    with pytest.raises(ConfigError, match=named):
        read_folder(index(tmp_path, weight_map))


def test_a_folder_with_other_formats_only_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match="convert the weights to safetensors"):
        read_folder(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "x.safetensors", {"a": entry(0, 64, [16])})
    write(tmp_path / "y.safetensors", {"a": entry(0, 32, [8]), "b": entry(32, 64, [8])})
    index(tmp_path, {"a": "x.safetensors", "b": "y.safetensors"})
    with pytest.raises(ConfigError, match="tensor 'a' is not in this shard according to"):
        read_folder(tmp_path)
