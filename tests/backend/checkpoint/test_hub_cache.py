"""Names of the hub, and where their files are."""

from __future__ import annotations

from pathlib import Path

import pytest

from inflight.checkpoint.hub_cache import find_snapshot, name_of_snapshot, split_name


@pytest.mark.parametrize(
    ("model", "found"),
    [
        ("acme/tiny-1.5", ("acme/tiny-1.5", "main")),
        ("acme/tiny@v1.0", ("acme/tiny", "v1.0")),
        ("acme/tiny@refs/pr/3", ("acme/tiny", "refs/pr/3")),
        ("tiny", None),
        ("a/b/c", None),
        ("../tiny", None),
        ("acme/..", None),
        ("/acme/tiny", None),
        ("https://huggingface.co/acme/tiny", None),
        ("acme/tiny@", None),
    ],
)
def test_names_have_an_organisation_and_may_have_a_revision(
    model: str, found: tuple[str, str] | None
) -> None:
    assert split_name(model) == found


@pytest.mark.parametrize(
    ("variable", "folder"),
    [
        ("HF_HUB_CACHE", "."),
        ("HUGGINGFACE_HUB_CACHE", "."),
        ("HF_HOME", "hub"),
        ("XDG_CACHE_HOME", "huggingface/hub"),
        ("HOME", ".cache/huggingface/hub"),
    ],
)
def test_the_cache_is_where_other_clients_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, folder: str
) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    assert find_snapshot("acme/tiny") is None
    repository = tmp_path / folder / "models--acme--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("c0ffee")
    assert find_snapshot("acme/tiny") is None  # nothing was downloaded yet
    (repository / "snapshots" / "c0ffee").mkdir(parents=True)
    found = find_snapshot("acme/tiny")
    assert found == repository / "snapshots" / "c0ffee"
    assert find_snapshot("acme/tiny@c0ffee") == found
    assert find_snapshot("acme/tiny@v2") is None
    assert name_of_snapshot(found) == "tiny"


def test_other_folders_are_no_snapshots(tmp_path: Path) -> None:
    assert name_of_snapshot(tmp_path / "snapshots" / "c0ffee") is None
    assert name_of_snapshot(tmp_path) is None
