"""Checks weights against a SHA256SUMS file beside them, in the format of `sha256sum`."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable
from pathlib import Path

from inflight.checkpoint.locate import Checkpoint
from inflight.errors import ConfigError

NAME = "SHA256SUMS"
MAX_BYTES = 1 << 20
CHUNK_BYTES = 64 << 20  # between two reports
# A digest, a space, a space or an asterisk for binary mode, and the name.
_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](?:\./)?(.+)")


def check(checkpoint: Checkpoint, progress: Callable[[str, float], None]) -> None:
    """Compare each file of weights with its digest; does nothing without a SHA256SUMS file.

    Args:
        checkpoint: the model's files.
        progress: called with the file and the fraction of it that is done, in [0, 1].

    Raises:
        ConfigError: a digest differs, a file is not listed, or the list cannot be read.
    """
    is_folder = checkpoint.format == "huggingface"
    folder = checkpoint.path if is_folder else checkpoint.path.parent
    manifest = folder / NAME
    if not manifest.is_file():
        return
    digests = _read(manifest)
    files = sorted(folder.glob("*.safetensors")) if is_folder else [checkpoint.path]
    for path in files:
        wanted = digests.get(path.name)
        if wanted is None:
            raise ConfigError(f"{manifest}: does not list {path.name}; add its digest")
        found = _digest(path, progress)
        if not hmac.compare_digest(found, wanted):
            raise ConfigError(
                f"{path}: its SHA-256 digest is {found}, but {NAME} says {wanted}; download the "
                "file again"
            )


def _digest(path: Path, progress: Callable[[str, float], None]) -> str:
    digest, size, buffer = hashlib.sha256(), path.stat().st_size, bytearray(CHUNK_BYTES)
    with open(path, "rb", buffering=0) as file:
        done = 0
        while count := file.readinto(buffer):
            progress(f"checking {path.name}", done / size)
            digest.update(memoryview(buffer)[:count])
            done += count
    return digest.hexdigest()


def _read(manifest: Path) -> dict[str, str]:
    if manifest.stat().st_size > MAX_BYTES:
        raise ConfigError(f"{manifest}: is too large; allowed: {MAX_BYTES} bytes")
    digests = {}
    for number, line in enumerate(manifest.read_text(errors="replace").splitlines(), 1):
        match = _LINE.fullmatch(line)
        if match is None and line.strip():
            raise ConfigError(
                f"{manifest}: line {number} is not a digest and a name; write the file with "
                f"`sha256sum *.safetensors > {NAME}`"
            )
        if match is not None:
            digests[match.group(2)] = match.group(1).lower()
    return digests
