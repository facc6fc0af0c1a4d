"""The models of Triton that belong to one engine: its front, the text models and the ensembles."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inflight.errors import ConfigError

_LLM = re.compile(r'key:\s*"llm"\s*value:?\s*{\s*string_value:\s*"([^"]+)"')
_STEP = re.compile(r'\bmodel_name:\s*"([^"]+)"')


@dataclass(frozen=True, slots=True)
class ModelGroup:
    """An engine's models.

    Attributes:
        folder: of the model with the engine, which names the group.
        members: folders of all its models in the order in which they load: no model is needed by an
            earlier one.
    """

    folder: Path
    members: tuple[Path, ...]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def names(self) -> list[str]:
        return [member.name for member in self.members]


def _folders(repositories: Sequence[Path]) -> list[Path]:
    """The models' folders."""
    return [
        folder
        for repository in repositories
        if repository.is_dir()
        for folder in sorted(repository.iterdir())
        if (folder / "config.pbtxt").is_file()
    ]


def other_models(repositories: Sequence[Path]) -> list[str]:
    """Names of the models that belong to no group."""
    members = {folder for one in find_groups(repositories).values() for folder in one.members}
    return [folder.name for folder in _folders(repositories) if folder not in members]


def find_groups(repositories: Sequence[Path]) -> dict[str, ModelGroup]:
    """The groups of all repositories, by name."""
    folders = _folders(repositories)
    texts = {folder: (folder / "config.pbtxt").read_text(errors="replace") for folder in folders}
    found = {}
    for llm in folders:
        if not any(llm.glob("*/engine.json")):
            continue
        text_models = [
            one for one in folders if llm.name in _LLM.findall(texts[one]) and one != llm
        ]
        ensembles = [one for one in folders if llm.name in _STEP.findall(texts[one])]
        found[llm.name] = ModelGroup(llm, (*text_models, llm, *ensembles))
    return found


ALL_MODELS = ("*",)


def has_version_policy(folder: Path) -> bool:
    """Whether a model's config.pbtxt may have one."""
    return "version_policy" in (folder / "config.pbtxt").read_text(errors="replace")


def parse_config(folder: Path) -> Any:
    """A model's config.pbtxt as Triton's message ModelConfig.

    Raises:
        ConfigError: the file is not valid.
    """
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2  # imports grpc, which takes a while

    config = model_config_pb2.ModelConfig()
    try:
        text_format.Parse((folder / "config.pbtxt").read_text(), config)
    except (OSError, UnicodeDecodeError, text_format.ParseError) as error:
        raise ConfigError(f"{folder.name}/config.pbtxt: not valid ({error})") from None
    return config


def config_of(folder: Path, generation: int) -> str:
    """A model's config.pbtxt as JSON, with a parameter `generation`: to Triton 2.51 a model whose
    files have not changed is loaded already, and loading it again does nothing.

    Raises:
        ConfigError: the file is not valid.
    """
    from google.protobuf import json_format

    config = parse_config(folder)
    config.name = folder.name
    config.parameters["generation"].string_value = str(generation)
    return str(json_format.MessageToJson(config, preserving_proto_field_name=True, indent=None))
