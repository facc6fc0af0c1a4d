"""`inflight pull` as its users run it, from a mirror of the hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hub
import tiny
from hub import COMMIT, Hub
from inflight.checkpoint.locate import locate
from inflight.cli.checkpoints.pull import check_space
from inflight.deploy import repository
from inflight.errors import CapacityError

MODEL = "acme/tiny-1.5"
# The library resumes after whole chunks of 10 MB: an embedding of 15 MB.
VOCAB_SIZE = 60_000
CUT_BYTES = 12_000_000


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    files = tmp_path / "files"
    tiny.write_llama(files, shards=2, vocab_size=VOCAB_SIZE)
    (files / "generation_config.json").write_text("{}")
    for name in ("README.md", "pytorch_model.bin", "consolidated.safetensors"):
        (files / name).write_text("not needed")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    with hub.serve(MODEL, files) as mirror:
        yield mirror


def pull(mirror: Hub, *arguments: str, **variables: str) -> tuple[int, str, str]:
    """Exit status, stdout, stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "inflight.cli.app", "pull", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_ENDPOINT": mirror.url, "HF_HUB_DISABLE_XET": "1", **variables},
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


def test_a_pulled_model_is_found_by_its_name(mirror: Hub, tmp_path: Path) -> None:
    mirror_cut = {"model-00001-of-00002.safetensors": CUT_BYTES}
    mirror.cut = dict(mirror_cut)
    status, out, error = pull(mirror, MODEL)
    assert status == 0, error
    assert out.startswith(f"pulled {MODEL}: 5 files, ")
    assert f"next: inflight serve {MODEL}" in error

    found = locate(MODEL)
    assert (found.format, found.name) == ("huggingface", "tiny-1.5")
    assert sorted(path.name for path in found.path.iterdir()) == [
        *("config.json", "generation_config.json", "model-00001-of-00002.safetensors"),
        *("model-00002-of-00002.safetensors", "model.safetensors.index.json"),
    ]
    for path in found.path.iterdir():
        assert path.read_bytes() == mirror.files[path.name].read_bytes()
    assert locate(f"{MODEL}@{COMMIT}").path == found.path

    first, second = (wanted for name, wanted in mirror.gets if name in mirror_cut)
    assert first is None
    assert second is not None and second.startswith("bytes=10")

    mirror.gets.clear()
    assert pull(mirror, MODEL)[0] == 0
    assert mirror.gets == []  # nothing is downloaded twice

    # Pods start while the hub is down.
    status, _, error = pull(mirror, MODEL, HF_ENDPOINT="http://127.0.0.1:9")
    assert status == 0 and "what was downloaded before is complete" in error
    (found.path / "model-00002-of-00002.safetensors").unlink()
    assert pull(mirror, MODEL, HF_ENDPOINT="http://127.0.0.1:9")[0] == 1

    made = repository.init(MODEL, tmp_path / "repository", settings={"random_weights": True})
    engine = json.loads((made.path / "llm" / "1" / "engine.json").read_text())
    assert locate(engine["model"]).path == found.path


def test_one_gguf_file_is_chosen_by_a_pattern(mirror: Hub, tmp_path: Path) -> None:
    for path in mirror.folder.iterdir():
        path.unlink()
    for name in ("tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf", "big-00001-of-00002.gguf"):
        (mirror.folder / name).write_text(name)
    status, _, error = pull(mirror, MODEL)
    assert status == 1
    assert error.startswith(f"error: {MODEL}: 3 GGUF files; choose one with --gguf: big-")
    assert "split GGUF files are not supported" in pull(mirror, MODEL, "--gguf", "big")[2]
    folder = tmp_path / "models" / "tiny"
    status, _, error = pull(mirror, MODEL, "--gguf", "q4_k_m", "--dir", str(folder))
    assert status == 0, error
    assert f"next: inflight serve {folder}" in error
    assert locate(str(folder)).path == folder / "tiny-Q4_K_M.gguf"


def test_an_architecture_that_is_not_supported_is_refused_before_the_weights(mirror: Hub) -> None:
    config = mirror.folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "bert"}))
    status, _, error = pull(mirror, MODEL)
    assert status == 1
    assert "the architecture 'bert' is not supported" in error
    assert not any(name.endswith(".safetensors") for name, _ in mirror.gets)


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["acme/other"], 0, "the hub has no such model"),
        ([f"{MODEL}@v9"], 0, "the model has no such revision"),
        ([MODEL], 403, "the hub answers 403"),
        (["tiny"], 0, "'tiny' is not a model of the hub; allowed: ORGANISATION/NAME"),
        ([MODEL, "--gguf", "q4"], 0, "has no GGUF file; omit --gguf"),
    ],
)
def test_failures_are_one_line(mirror: Hub, arguments: list[str], status: int, text: str) -> None:
    mirror.status = status
    code, out, error = pull(mirror, *arguments)
    (line,) = error.strip().splitlines()
    assert (code, out) == (1, "")
    assert line.startswith("error: ") and text in line


def test_a_hub_that_cannot_be_reached_is_one_line(mirror: Hub) -> None:
    code, _, error = pull(mirror, MODEL, HF_ENDPOINT="http://127.0.0.1:9")
    assert code == 1
    assert error.strip() == f"error: {MODEL}: the hub cannot be reached; check HF_ENDPOINT"


def test_a_disk_without_room_is_refused(tmp_path: Path) -> None:
    check_space(tmp_path / "new" / "folder", 1)
    with pytest.raises(CapacityError, match=r"choose another disk with --dir or HF_HOME"):
        check_space(tmp_path / "new" / "folder", 1 << 60)
