"""Finds the configured drafter among the modules of `methods`.

Importing this module loads no method, and no torch.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil

from inflight.checkpoint.locate import Checkpoint, locate
from inflight.config import EngineConfig, SpeculativeConfig
from inflight.errors import ConfigError, did_you_mean
from inflight.execution.drafters import methods
from inflight.execution.drafters.drafter_spec import DrafterSpec, DraftMethod
from inflight.models.spec import ModelSpec


def method_names() -> list[str]:
    """The allowed values of `speculative_config.method`."""
    return sorted(module.name for module in pkgutil.iter_modules(methods.__path__))


def find_method(settings: SpeculativeConfig) -> DraftMethod:
    """The method of the settings, with its required settings checked.

    Raises:
        ConfigError: unknown method, or a setting is missing or not used by the method.
    """
    names = method_names()
    if settings.method not in names:
        hint = did_you_mean(settings.method.lower(), names)
        raise ConfigError(
            f"speculative_config.method: {settings.method!r} is unknown; allowed: "
            f"{', '.join(names)}{hint}"
        )
    module = importlib.import_module(f"{methods.__name__}.{settings.method}")
    method: DraftMethod = module.METHOD
    for name, required in (
        ("model", method.requires_model),
        ("num_layers", method.requires_num_layers),
    ):
        if required != (getattr(settings, name) is not None):
            raise ConfigError(
                f"speculative_config.{name}: is {'required' if required else 'not used'} by "
                f"the method {settings.method}"
            )
    if settings.suffix_decoding_max_cached_tokens and not method.caches_outputs:
        raise ConfigError(
            "speculative_config.suffix_decoding_max_cached_tokens: is not used by the method "
            f"{settings.method}"
        )
    return method


def find_drafter(
    config: EngineConfig, checkpoint: Checkpoint, model: ModelSpec
) -> DrafterSpec | None:
    """The configured drafter; None if there is none.

    Args:
        config: the engine's settings.
        checkpoint: of the target model.
        model: its spec.

    Raises:
        ConfigError: unknown method, or its checkpoint is missing, corrupt, or for another model.
    """
    settings = config.speculative_config
    if settings is None:
        return None
    method = find_method(settings)
    if settings.num_layers is not None and settings.num_layers > model.num_layers:
        raise ConfigError(
            f"speculative_config.num_layers: {settings.num_layers} is out of range; allowed: 1 to "
            f"{model.num_layers}, the number of the model's layers"
        )
    if settings.model is None:
        return DrafterSpec(method, settings)
    try:
        own = dataclasses.replace(locate(settings.model), random_weights=config.random_weights)
        return method.read(DrafterSpec(method, settings, own), checkpoint, model)
    except ConfigError as error:
        raise ConfigError(
            f"speculative_config.model: {str(error).removeprefix('model: ')}"
        ) from None
