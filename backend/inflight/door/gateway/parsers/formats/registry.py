"""All formats of tool calls, by name."""

from __future__ import annotations

from inflight.door.gateway.parsers.formats import (
    deepseek,
    harmony,
    hermes,
    json_list,
    llama3_json,
    mistral,
    pythonic,
    qwen3_coder,
)
from inflight.door.gateway.parsers.formats.tool_format import ToolFormat
from inflight.errors import ConfigError, did_you_mean

# Templates are compared in this order: those of Qwen 3 Coder contain Hermes's markers, too, and
# those of Llama 4 the tag of Llama 3.1.
_FORMATS = (
    harmony.FORMAT,
    deepseek.V3,
    deepseek.V31,
    qwen3_coder.FORMAT,
    hermes.FORMAT,
    mistral.FORMAT,
    pythonic.FORMAT,
    llama3_json.FORMAT,
    json_list.FORMAT,
)

FORMATS = {one.name: one for one in _FORMATS}


def find_format(name: str) -> ToolFormat:
    """The format of a name.

    Raises:
        ConfigError: there is none.
    """
    found = FORMATS.get(name)
    if found is None:
        raise ConfigError(
            f"the format of tool calls {name!r} is unknown; allowed: {', '.join(FORMATS)}"
            f"{did_you_mean(name, FORMATS)}"
        )
    return found
