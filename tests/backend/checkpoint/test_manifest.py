"""Weights that do not match the SHA256SUMS file beside them are refused."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

from inflight.checkpoint import manifest
from inflight.checkpoint.locate import Checkpoint
from inflight.config import EngineConfig
from inflight.errors import ConfigError
from inflight.execution import factory
from tiny import write_llama


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two shards and the list that sha256sum writes."""
    for name in ("model-1.safetensors", "model-2.safetensors"):
        (tmp_path / name).write_bytes(name.encode() * 1000)
    command = "sha256sum *.safetensors > SHA256SUMS"
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    return tmp_path


def check(path: Path, format: str = "huggingface") -> list[str]:
    """What is reported."""
    found: list[str] = []
    checkpoint = Checkpoint(path, format)  # type: ignore[arg-type]
    manifest.check(checkpoint, lambda what, fraction: found.append(f"{what} {fraction}"))
    return found


def test_files_that_match_are_accepted(folder: Path) -> None:
    assert check(folder) == [
        "checking model-1.safetensors 0.0",
        "checking model-2.safetensors 0.0",
    ]


def test_a_large_file_is_reported_as_it_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "CHUNK_BYTES", 9_000)
    shares = [float(line.rpartition(" ")[2]) for line in check(folder)]
    assert shares == pytest.approx([0.0, 9 / 19, 18 / 19] * 2)


def test_without_a_list_nothing_is_read(folder: Path) -> None:
    (folder / manifest.NAME).unlink()
    assert check(folder) == []


def test_a_changed_byte_is_found(folder: Path) -> None:
    path = folder / "model-2.safetensors"
    content = bytearray(path.read_bytes())
    content[500] ^= 1
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"model-2\.safetensors: its SHA-256 digest is [0-9a-f]+"):
        check(folder)


def test_a_file_that_is_not_listed_is_refused(folder: Path) -> None:
    (folder / "model-3.safetensors").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"SHA256SUMS: does not list model-3\.safetensors"):
        check(folder)


@pytest.mark.parametrize("line", ["nonsense", "a" * 63 + "  model-1.safetensors", "a" * 64])
def test_a_broken_line_is_named(folder: Path, line: str) -> None:
    with open(folder / manifest.NAME, "a") as file:
        file.write(f"\n{line}\n")
    with pytest.raises(ConfigError, match="line 4 is not a digest and a name"):
        check(folder)


def test_a_gguf_file_is_checked_alone(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"weights").hexdigest().upper()
    (tmp_path / "one.gguf").write_bytes(b"weights")
    (tmp_path / "two.gguf").write_bytes(b"others")
    (tmp_path / manifest.NAME).write_text(f"{digest} *./one.gguf\n")
    assert check(tmp_path / "one.gguf", "gguf") == ["checking one.gguf 0.0"]
    with pytest.raises(ConfigError, match="does not list two"):
        check(tmp_path / "two.gguf", "gguf")


def test_a_model_is_not_loaded_from_changed_weights(tmp_path: Path) -> None:
    checkpoint = write_llama(tmp_path / "model")
    (checkpoint.path / manifest.NAME).write_text("0" * 64 + "  model.safetensors\n")
    config = EngineConfig(model=str(checkpoint.path), num_blocks=8)
    with pytest.raises(ConfigError, match="its SHA-256 digest is"):
        factory.build(config, checkpoint, lambda what, fraction: None)
