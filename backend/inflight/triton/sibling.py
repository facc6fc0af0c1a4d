"""The model `llm` of a repository, through which the text models find the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from inflight import config
from inflight.checkpoint.locate import locate
from inflight.errors import ConfigError
from inflight.ipc.engine_client import engine_config_path
from inflight.text.tokenizer import Tokenizer


def llm_directory(directory: Path, parameters: Mapping[str, str]) -> Path:
    """The folder of the model that the parameter `llm` names, in the same repository.

    Raises:
        ConfigError: there is no such parameter or no such folder.
    """
    name = parameters.get("llm", "")
    llm = directory.parent / name
    if not name or name != Path(name).name or not llm.is_dir():
        raise ConfigError(
            f"{directory / 'config.pbtxt'}: the parameter 'llm' is {name!r}; it must name the "
            f"folder of the llm model in {directory.parent}"
        )
    return llm


def check_version(llm: Path, version: str) -> None:
    """Refuse a version that has an engine.json but not the highest: one folder has one engine.

    Raises:
        ConfigError: several versions are to be served by tritonserver alone.
    """
    highest = engine_config_path(llm).parent.name
    if version != highest and (llm / version / "engine.json").is_file():
        raise ConfigError(
            f"version {version} of {llm.name} is not the highest, {highest}: a version_policy for "
            "other versions requires `inflight serve`"
        )


def load_tokenizer(llm: Path) -> Tokenizer:
    """The tokenizer of an llm model's checkpoint.

    Raises:
        ConfigError: there is none.
    """
    settings = config.load(engine_config_path(llm))
    tokenizer = Tokenizer.load_if_present(locate(settings.model))
    if tokenizer is None:
        raise ConfigError(f"{settings.model}: has no tokenizer, so the model takes token ids only")
    return tokenizer
