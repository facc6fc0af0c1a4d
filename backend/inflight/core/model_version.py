"""Names of the versions of a model that are served side by side.

Triton has one configuration for all versions of an ensemble, so an ensemble cannot call another
version of its steps in each. Hence each version has models of its own in Triton: NAME@VERSION. The
doors refuse "@" in names, so clients reach them only as NAME and its version.
"""

from __future__ import annotations

SEPARATOR = "@"


def versioned(name: str, version: int) -> str:
    """Triton's name of a version of a model."""
    return f"{name}{SEPARATOR}{version}"


def split_version(name: str) -> tuple[str, int | None]:
    """A model's name and version; None: it is not one of several versions."""
    public, separator, version = name.rpartition(SEPARATOR)
    if not separator or not version.isdecimal():
        return name, None
    return public, int(version)


def public_name(name: str) -> str:
    """The name that clients use for one of Triton's models."""
    return split_version(name)[0]
