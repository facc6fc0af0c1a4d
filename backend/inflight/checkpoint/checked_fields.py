"""Settings of a checkpoint, read with checks of type and range."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from inflight.checkpoint.gguf import GgufArray
from inflight.errors import ConfigError


class CheckedFields:
    """Settings by name. null counts as absent. Which of them are read is recorded.

    Args:
        raw: the settings.
        where: the file, for errors.
    """

    def __init__(self, raw: dict[str, Any], where: str) -> None:
        self.where = where
        self._raw = raw
        self._read: set[str] = set()

    def error(self, what: str) -> ConfigError:
        return ConfigError(f"{self.where}: {what}")

    def __contains__(self, key: str) -> bool:
        """Whether the key is present, even if null."""
        self._read.add(key)
        return key in self._raw

    def keys_read(self) -> frozenset[str]:
        """The keys that were asked for, whether or not they are present."""
        return frozenset(self._read)

    def unread(self) -> dict[str, Any]:
        """The settings that nobody has asked for."""
        return {key: value for key, value in self._raw.items() if key not in self._read}

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        value = self._raw.get(key)
        return default if value is None else value

    def with_defaults(self, defaults: Mapping[str, Any]) -> CheckedFields:
        """The same with other values of absent keys."""
        missing = {key: value for key, value in defaults.items() if key not in self._raw}
        return CheckedFields(self._raw | missing, self.where) if missing else self

    def text(self, key: str) -> str:
        value = self.get(key)
        if value is None:
            raise self.error(f"{key} is missing")
        if not isinstance(value, str):
            raise self.error(f"{key}: {value!r} is not a string")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 1 << 31:
            shown = "varies by layer" if isinstance(value, GgufArray) else repr(value)
            raise self.error(f"{key}: {shown}; allowed: an integer of at least 1")
        return value

    def number(self, key: str, default: float | None = None, low: float = 1e-30) -> float:
        value = self.get(key, default)
        allowed = isinstance(value, int | float) and not isinstance(value, bool)
        if not allowed or not math.isfinite(value) or value < low:
            raise self.error(f"{key}: {value!r}; allowed: a finite number above 0")
        return float(value)

    def positive_numbers(self, key: str) -> list[float]:
        values = self.get(key)
        if not isinstance(values, list) or not values:
            raise self.error(f"{key}: {values!r}; allowed: a list of finite numbers above 0")
        each = (CheckedFields({key: value}, self.where) for value in values)
        return [value.number(key) for value in each]

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.error(f"{key}: {value!r}; allowed: true, false")
        return value

    def token_ids(self, *keys: str) -> tuple[int, ...]:
        """The ids of all these keys, each an id or a list; in order, without duplicates."""
        found: list[int] = []
        for key in keys:
            value = self.get(key)
            for token_id in value if isinstance(value, list) else [value]:
                if token_id is None:
                    continue
                whole = isinstance(token_id, int) and not isinstance(token_id, bool)
                if not whole or token_id < 0:
                    raise self.error(f"{token_id!r} is not a token id")
                found.append(token_id)
        return tuple(dict.fromkeys(found))


def read_json(path: Path) -> CheckedFields:
    """The settings of a JSON file.

    Raises:
        ConfigError: unreadable, or not a JSON object.
    """
    try:
        raw = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return CheckedFields(raw, str(path))
