"""`inflight quantize` writes a folder that `inflight serve` loads, or says why not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tiny
from inflight.checkpoint.locate import Checkpoint
from inflight.cli.checkpoints import quantize
from inflight.errors import ConfigError
from inflight.models.registry import read_spec


def test_a_summary_names_the_sizes_and_what_is_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.write_llama(tmp_path / "in")
    quantize.run(str(tmp_path / "in"), tmp_path / "out", "fp8", as_json=False)
    shown = capsys.readouterr()
    assert shown.out.startswith(f"{tmp_path}/out: 14 of 21 tensors in FP8, ")
    assert shown.err.endswith(f"next: inflight serve {tmp_path}/out\n")
    read_spec(Checkpoint(tmp_path / "out", "huggingface"))


def test_json_is_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.write_llama(tmp_path / "in")
    quantize.run(str(tmp_path / "in"), tmp_path / "out", "int8", as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert (found["format"], found["num_quantized"], found["num_tensors"]) == ("int8", 14, 21)
    assert found["path"] == str(tmp_path / "out")
    assert found["bytes_after"] < found["bytes_before"]


def test_what_cannot_be_quantised_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--format int3 is unknown; allowed: fp8, int8, int4"):
        quantize.run(str(tmp_path), tmp_path / "out", "int3", as_json=False)
    tiny.write_llama(tmp_path / "in")
    quantize.run(str(tmp_path / "in"), tmp_path / "out", "fp8", as_json=False)
    with pytest.raises(ConfigError, match=r"quantised already \(FP8 \(compressed-tensors\)\)"):
        quantize.run(str(tmp_path / "out"), tmp_path / "again", "fp8", as_json=False)
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="is a GGUF file; quantize the Hugging Face folder"):
        quantize.run(str(file), tmp_path / "again", "fp8", as_json=False)
