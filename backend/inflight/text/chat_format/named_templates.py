"""Chat templates of a checkpoint by name, wherever its files have them.

A checkpoint has one template, or several under names: `default`, `tool_use` for chats with tools,
and others, which no request selects.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inflight.errors import ConfigError

DEFAULT = "default"
TOOL_USE = "tool_use"
FILE = "chat_template.jinja"
FOLDER = "additional_chat_templates"
LEGACY_FILE = "chat_template.json"
MAX_FILE_BYTES = 1 << 20
_GGUF_KEY = "tokenizer.chat_template"


def of_folder(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The templates of a Hugging Face folder: name -> Jinja source.

    As in transformers, files of templates take the place of all in tokenizer_config.json.

    Args:
        folder: of the checkpoint.
        config: its tokenizer_config.json.

    Raises:
        ConfigError: a file cannot be read or is too large.
    """
    paths = {path.stem: path for path in sorted((folder / FOLDER).glob("*.jinja"))}
    if (folder / FILE).is_file():
        paths = {DEFAULT: folder / FILE, **paths}
    if paths:
        return {name: _read(path) for name, path in paths.items()}
    found = _named(config.get("chat_template"))
    if found or not (folder / LEGACY_FILE).is_file():
        return found
    try:
        legacy = json.loads(_read(folder / LEGACY_FILE))
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"chat template: {folder / LEGACY_FILE} cannot be read: {error}"
        ) from None
    return _named(legacy.get("chat_template") if isinstance(legacy, dict) else None)


def of_gguf(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The templates in the metadata of a GGUF file: name -> Jinja source."""
    prefix = f"{_GGUF_KEY}."
    named = {
        key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)
    }
    return _strings({DEFAULT: metadata.get(_GGUF_KEY), **named})


def in_config(templates: Mapping[str, str]) -> str | list[dict[str, str]] | None:
    """The value of `chat_template` in tokenizer_config.json."""
    if set(templates) <= {DEFAULT}:
        return templates.get(DEFAULT)
    return [{"name": name, "template": template} for name, template in templates.items()]


def of_chats(templates: Mapping[str, str]) -> str | None:
    """The template of chats: the default one, or without that name the first one."""
    others = [template for name, template in templates.items() if name != TOOL_USE]
    return templates.get(DEFAULT, next(iter([*others, *templates.values()]), None))


def _named(value: Any) -> dict[str, str]:
    """From a source, or a list of objects with name and template."""
    if isinstance(value, list):
        entries = [entry for entry in value if isinstance(entry, dict)]
        return _strings({entry.get("name"): entry.get("template") for entry in entries})
    return _strings({DEFAULT: value})


def _strings(templates: Mapping[Any, Any]) -> dict[str, str]:
    return {
        name: template
        for name, template in templates.items()
        if isinstance(name, str) and isinstance(template, str)
    }


def _read(path: Path) -> str:
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise ConfigError(
                f"chat template: {path} has {size} bytes, which is too much; "
                f"allowed: {MAX_FILE_BYTES}"
            )
        return path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"chat template: {path} cannot be read: {error}") from None
