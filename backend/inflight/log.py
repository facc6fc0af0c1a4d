"""Where our processes log: to standard error, which is the server's log."""

from __future__ import annotations

import logging
import os
import sys

from inflight.errors import ConfigError

LEVEL_VARIABLE = "INFLIGHT_LOG_LEVEL"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def level() -> str:
    """That the environment asks for.

    Raises:
        ConfigError: there is no such level.
    """
    name = os.environ.get(LEVEL_VARIABLE, "INFO")
    if name.upper() not in _LEVELS:
        raise ConfigError(f"{LEVEL_VARIABLE}: {name!r} is unknown; allowed: {', '.join(_LEVELS)}")
    return name.upper()


def begin() -> None:
    """Log from now on.

    Raises:
        ConfigError: see `level`.
    """
    logging.basicConfig(
        level=level(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
