"""Logging of our processes: to standard error, which is the server's log.

A record is one line whatever its message contains, so that no text of a client can pass for a
record. A request's id is `extra={"request_id": ...}`; texts of prompts and outputs are not logged.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import re
import sys

from inflight.errors import ConfigError

LEVEL_VARIABLE = "INFLIGHT_LOG_LEVEL"
FORMAT_VARIABLE = "INFLIGHT_LOG_FORMAT"
FORMATS = ("text", "json")
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
# Of Unicode: C0 and C1, and the separators that some readers take for line breaks.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def level() -> str:
    """The log level set in the environment.

    Raises:
        ConfigError: there is no such level.
    """
    name = os.environ.get(LEVEL_VARIABLE, "INFO")
    if name.upper() not in _LEVELS:
        raise ConfigError(f"{LEVEL_VARIABLE}: {name!r} is unknown; allowed: {', '.join(_LEVELS)}")
    return name.upper()


def formatter(prefix: str = "") -> logging.Formatter:
    """The formatter of the format set in the environment; prefix: of lines of text, for a process
    that is not named by its loggers.

    Raises:
        ConfigError: there is no such format.
    """
    name = os.environ.get(FORMAT_VARIABLE) or "text"
    if name not in FORMATS:
        raise ConfigError(f"{FORMAT_VARIABLE}: {name!r} is unknown; allowed: {', '.join(FORMATS)}")
    if name == "json":
        return _JsonFormatter()
    return _TextFormatter(f"%(asctime)s {prefix or '%(levelname)s %(name)s:'} %(message)s")


def begin() -> None:
    """Configure logging.

    Raises:
        ConfigError: see `level` and `formatter`.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter())
    logging.basicConfig(level=level(), handlers=[handler])


class _TextFormatter(logging.Formatter):
    """A line for a record; the lines of an exception's traceback follow."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return _CONTROL.sub(_escaped, super().formatMessage(record))


class _JsonFormatter(logging.Formatter):
    """A JSON object in ASCII: time, level, logger, message; request_id and exception if any."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        found = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        request_id = getattr(record, "request_id", None)
        if request_id is not None:
            found["request_id"] = str(request_id)
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        # JSON allows DEL, the only control character that is left.
        return json.dumps(found).replace("\x7f", "\\u007f")


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
