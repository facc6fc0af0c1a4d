"""<think>...</think>, of DeepSeek R1, Qwen 3 and others.

The tag opens at the start of an output or in the prompt; elsewhere it is text. White space next to
the tags is dropped.
"""

from __future__ import annotations

from inflight.door.gateway.parsers.reader import Reader, Steps
from inflight.door.gateway.parsers.writer import Writer
from inflight.errors import ConfigError

FORMAT = "think"
OPEN = "<think>"
CLOSE = "</think>"


def read_reasoning(reader: Reader, writer: Writer, in_reasoning: bool) -> Steps[None]:
    """Read the reasoning at the start of an output, and the white space after it.

    Args:
        in_reasoning: the prompt contains the opening tag. The output may repeat it.
    """
    reader.record()
    yield from reader.skip()
    is_open = yield from reader.accept(OPEN)
    skipped = reader.recorded()
    if not is_open and not in_reasoning:
        writer.text(skipped)
        return
    yield from reader.skip()
    if (yield from reader.until((CLOSE,), writer.reasoning)):
        reader.recorded()
        yield from reader.skip()


def check_reasoning_format(name: str) -> None:
    """Refuse an unknown format.

    Raises:
        ConfigError: naming what is allowed.
    """
    if name != FORMAT:
        raise ConfigError(f"the format of reasoning {name!r} is unknown; allowed: {FORMAT}")
