"""Models of the Hugging Face hub on this machine: the cache that all its clients share.

Layout: https://huggingface.co/docs/huggingface_hub/guides/manage-cache. Nothing is downloaded here.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_REPOSITORY = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_NAME = re.compile(rf"({_REPOSITORY})(?:@([A-Za-z0-9][A-Za-z0-9._/-]{{0,127}}))?")
_PREFIX = "models--"
DEFAULT_REVISION = "main"


def split_name(model: str) -> tuple[str, str] | None:
    """Repository and revision of ORGANISATION/NAME or ORGANISATION/NAME@REVISION; None for
    anything else."""
    found = _NAME.fullmatch(model)
    if found is None or ".." in model:
        return None
    return found[1], found[2] or DEFAULT_REVISION


def find_snapshot(model: str) -> Path | None:
    """The folder of a model that was pulled; None if there is none, or it is not a hub's name."""
    name = split_name(model)
    if name is None:
        return None
    repository, revision = name
    folder = _cache() / f"{_PREFIX}{repository.replace('/', '--')}"
    try:
        commit = (folder / "refs" / revision).read_text().strip()
    except OSError:  # a commit itself is a revision, too
        commit = revision
    snapshot = folder / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def name_of_snapshot(path: Path) -> str | None:
    """NAME of the repository whose snapshot a folder is; None for other folders."""
    folder = path.parent.parent.name
    if path.parent.name != "snapshots" or not folder.startswith(_PREFIX):
        return None
    return folder.rpartition("--")[2]


def _cache() -> Path:
    """As huggingface_hub finds it."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if named := os.environ.get(variable):
            return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(base, "huggingface")
    return Path(home).expanduser() / "hub"
