"""The keys file: JSON, changed by `inflight key` and read by the doors."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec

from inflight.access.key import ID_DIGITS, Key
from inflight.errors import ConfigError

MAX_BYTES = 16 << 20


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: list[Key] = []


def default_path() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base, "inflight", "keys.json")


def read(path: Path) -> list[Key]:
    """All keys, expired ones included.

    Raises:
        ConfigError: it cannot be read, is malformed, or others may write it.
    """
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_BYTES:
                raise ConfigError(f"{path}: allowed: a file of up to {MAX_BYTES} bytes")
            # A user who can write it can grant access. Secrets mounted into containers are 0644.
            if found.st_uid not in (0, os.getuid()) or found.st_mode & 0o022:
                raise ConfigError(
                    f"{path}: other users may write it; allowed: owner {os.getuid()}, mode 0600"
                )
            keys = msgspec.json.decode(file.read(), type=_Content).keys
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; create it with `inflight key create`"
        ) from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: is not a keys file: {error}") from None
    if len({key.id for key in keys}) != len(keys):
        raise ConfigError(f"{path}: has a key twice; allowed: once")
    return keys


def add(path: Path, key: Key) -> None:
    """Store a key; creates the file, with mode 0600, if there is none.

    Raises:
        ConfigError: see `read`.
    """
    with _locked(path):
        _write(path, [*_existing(path), key])


def revoke(path: Path, key_id: str) -> Key:
    """Remove a key; returns it.

    Raises:
        ConfigError: there is no such key; or see `read`.
    """
    with _locked(path):
        keys = read(path)
        for key in keys:
            if key.id == key_id:
                _write(path, [other for other in keys if other is not key])
                return key
    raise ConfigError(
        f"{path}: has no key {key_id!r}; allowed: an id of {ID_DIGITS} digits from "
        "`inflight key list`"
    )


def _existing(path: Path) -> list[Key]:
    return read(path) if path.exists() else []


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Two changes at once would lose one of them."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write(path: Path, keys: list[Key]) -> None:
    """Replace the file at once: a reader sees the former keys or these."""
    new = path.with_name(f"{path.name}.{os.getpid()}")
    content = msgspec.json.format(msgspec.json.encode(_Content(keys)), indent=2)
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content + b"\n")
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise ConfigError(f"{path}: {error.strerror}") from None
