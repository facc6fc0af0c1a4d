"""A file that is written or replaced has another signature."""

from __future__ import annotations

import os
from pathlib import Path

from inflight.core.file_signature import signature


def test_a_file_that_is_written_replaced_or_removed_has_another_signature(tmp_path: Path) -> None:
    path, other = tmp_path / "file", tmp_path / "other"
    path.write_text("a")
    other.write_text("a")
    seen = [signature(path)]
    assert signature(path) == seen[0]
    path.write_text("ab")
    seen.append(signature(path))
    os.replace(other, path)
    seen.append(signature(path))
    path.unlink()
    seen.append(signature(path))
    assert len(set(seen)) == 4 and seen[3] is None
