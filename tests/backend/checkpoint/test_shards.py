"""Files of weights are checked without reading them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import tiny
from inflight.checkpoint.shards import INDEX_NAME, SINGLE_NAME, check_files
from inflight.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny.write_llama(tmp_path, shards=3)
    return tmp_path


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def test_whole_folders_pass(folder: Path, tmp_path: Path) -> None:
    check_files(folder)
    tiny.write_llama(tmp_path / "single")
    check_files(tmp_path / "single")


def test_a_missing_shard_is_named(folder: Path) -> None:
    missing = shards(folder)[1]
    missing.unlink()
    with pytest.raises(ConfigError, match=rf"{missing.name}: listed in {INDEX_NAME}, but does not"):
        check_files(folder)


def test_no_weights_are_an_error(folder: Path) -> None:
    (folder / INDEX_NAME).unlink()
    with pytest.raises(ConfigError, match=f"neither {SINGLE_NAME} nor {INDEX_NAME} exists"):
        check_files(folder)


def test_a_truncated_shard_is_named(folder: Path) -> None:
    cut = shards(folder)[2]
    os.truncate(cut, cut.stat().st_size - 4)
    with pytest.raises(ConfigError, match=rf"{cut.name}: .*beyond the end of the file: truncated"):
        check_files(folder)


def test_a_tensor_of_the_index_that_is_in_no_shard_is_named(folder: Path) -> None:
    index = json.loads((folder / INDEX_NAME).read_text())
    index["weight_map"]["model.extra"] = shards(folder)[0].name
    (folder / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=f"'model.extra' of {INDEX_NAME} is not in it"):
        check_files(folder)


@pytest.mark.parametrize(
    "entry", ["text", {"dtype": "F32"}, {"data_offsets": ["a", "b"]}, {"data_offsets": 7}]
)
def test_an_entry_without_offsets_is_refused(folder: Path, entry: object) -> None:
    header = json.dumps({"a": entry}).encode()
    (folder / INDEX_NAME).unlink()
    (folder / SINGLE_NAME).write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ConfigError, match="invalid entry for tensor 'a'"):
        check_files(folder)
