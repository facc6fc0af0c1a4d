"""The model `llm` of a repository, through which the text models find the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

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


def describe(llm: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """What clients need to know of an llm model, as a JSON object; see `contract.DESCRIPTION`.

    Raises:
        ConfigError: the checkpoint or its settings are not supported.
    """
    from inflight.models.registry import read_spec  # 0.15 s, and most tokenizers are never asked

    settings = config.load(engine_config_path(llm))
    checkpoint = locate(settings.model)
    spec = read_spec(checkpoint)
    return {
        "model": settings.served_model_name or checkpoint.model_name,
        "max_model_len": spec.max_model_len(settings),
        "vocab_size": spec.vocab_size,
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "chat_template": tokenizer.chat_template,
        "tool_chat_template": tokenizer.tool_chat_template,
        "special_tokens": [text for _, text in sorted(tokenizer.special_ids.items())],
    }
