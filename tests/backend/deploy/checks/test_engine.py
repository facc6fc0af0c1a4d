"""What keeps an engine from loading is found before anything starts, with the model's name."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tiny
from inflight.deploy.checks.engine import check_engine
from inflight.errors import ConfigError

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a model's folder, whose checkpoint has three shards; returns it."""

    def written(**settings: Any) -> Path:
        model = tmp_path / "repository" / "one_llm"
        (model / "1").mkdir(parents=True)
        tiny.write_llama(tmp_path / "checkpoint", shards=3)
        engine = {"model": str(tmp_path / "checkpoint"), "device": "cpu", **settings}
        (model / "1" / "engine.json").write_text(json.dumps(engine))
        return model

    return written


def remove_a_shard(tmp_path: Path) -> None:
    sorted((tmp_path / "checkpoint").glob("model-*.safetensors"))[0].unlink()


def test_a_model_that_can_load_passes(write: Write) -> None:
    check_engine(write())


def test_weights_that_are_not_read_may_be_missing(write: Write, tmp_path: Path) -> None:
    model = write(random_weights=True)
    remove_a_shard(tmp_path)
    check_engine(model)


def test_a_missing_shard_is_refused(write: Write, tmp_path: Path) -> None:
    model = write()
    remove_a_shard(tmp_path)
    with pytest.raises(ConfigError, match=r"^model one_llm: .*does not exist$"):
        check_engine(model)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"max_num_seqs": -1}, "max_num_seqs"),
        ({"no_such_setting": 1}, "no_such_setting"),
        ({"model": "/missing"}, "/missing does not exist"),
        ({"max_model_len": 1 << 30}, "max_model_len"),
        ({"device": "cuda"}, "device: is cuda"),
        (
            {"speculative_config": {"method": "draft_model", "model": "/missing-draft"}},
            "/missing-draft does not exist",
        ),
    ],
)
def test_settings_are_refused(
    write: Write, settings: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match=f"^model one_llm: .*{re.escape(text)}"):
        check_engine(write(**settings))


def test_serve_refuses_in_one_line_and_starts_nothing(write: Write, tmp_path: Path) -> None:
    model = write()
    remove_a_shard(tmp_path)
    log = tmp_path / "log"
    arguments = ["--repository", str(model.parent), "--log-file", str(log)]
    ports = [f"--{kind}-port=0" for kind in ("http", "grpc", "metrics")]
    done = subprocess.run(
        [sys.executable, "-m", "inflight.cli.app", "serve", *arguments, *ports],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin", "XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)},
    )
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: model one_llm: ") and line.endswith("does not exist")
    assert not log.exists()
