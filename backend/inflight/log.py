"""Logging of our processes: to standard error, which is the server's log."""

from __future__ import annotations

import logging
import os
import sys

from inflight.errors import ConfigError

LEVEL_VARIABLE = "INFLIGHT_LOG_LEVEL"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def level() -> str:
    """The log level set in the environment.

    Raises:
        ConfigError: there is no such level.
    """
    name = os.environ.get(LEVEL_VARIABLE, "INFO")
    if name.upper() not in _LEVELS:
        raise ConfigError(f"{LEVEL_VARIABLE}: {name!r} is unknown; allowed: {', '.join(_LEVELS)}")
    return name.upper()


def begin() -> None:
    """Configure logging.

    Raises:
        ConfigError: see `level`.
    """
    logging.basicConfig(
        level=level(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
