"""Which of Triton's models answers a request for a model and a version."""

from __future__ import annotations

import re

from inflight.core.model_version import SEPARATOR, versioned
from inflight.errors import UnknownModel
from inflight.ipc.health import Health

# Of a name between quotes, in Triton's errors.
_QUOTED = re.compile(rf"('[\w.-]+){SEPARATOR}[0-9]+(?=')")


def resolve(health: Health, model: str, version: str) -> str:
    """Triton's name of a version of a model; without a version, of the highest that is loaded. A
    model without several versions has its own name.

    Args:
        version: decimal digits, or empty.

    Raises:
        UnknownModel: the version is not loaded.
    """
    loaded = health.versions.get(model)
    if loaded is None:
        return model
    if not loaded:
        raise UnknownModel(f"model_name: no version of model {model} is loaded")
    number = int(version) if version else loaded[-1]
    if number not in loaded:
        raise UnknownModel(
            f"model_version: model {model} has no version {number}; allowed: "
            f"{', '.join(map(str, loaded))}, or none for the highest"
        )
    return versioned(model, number)


def without_versions(text: str) -> str:
    """An error of Triton with the names that clients use."""
    return _QUOTED.sub(r"\1", text)
