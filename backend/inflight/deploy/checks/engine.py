"""Checks of a model's engine before anything is started: what can be seen in milliseconds."""

from __future__ import annotations

from pathlib import Path

from inflight import config
from inflight.checkpoint import shards
from inflight.checkpoint.locate import locate
from inflight.config import EngineConfig
from inflight.deploy.checks.device import check_device
from inflight.errors import ConfigError
from inflight.ipc.engine_client import engine_config_path
from inflight.models.registry import read_spec


def check_engine(model: Path) -> None:
    """Check the settings of a model, its device, and the files of its checkpoint.

    Args:
        model: folder of the model in its repository.

    Raises:
        ConfigError: its engine cannot load, with the reason.
    """
    try:
        found = config.load(engine_config_path(model))
        check_device(found)
        _check_files(found)
    except ConfigError as error:
        raise ConfigError(f"model {model.name}: {error}") from None


def _check_files(found: EngineConfig) -> None:
    """Raises ConfigError: a file is missing, truncated or not supported."""
    checkpoint = locate(found.model)
    read_spec(checkpoint).max_model_len(found)
    has_weights = found.device != "echo" and not found.random_weights
    if has_weights and checkpoint.format == "huggingface":  # a GGUF file's header is in the spec
        shards.check_files(checkpoint.path)
    drafter = found.speculative_config.model if found.speculative_config is not None else None
    if drafter is not None:
        locate(drafter)
