"""Chat templates, rendered as Hugging Face renders them, in a sandbox.

A template comes with the model and never with a request, but it is still third-party code. It runs
in a child process (`jinja_sandbox`) with limits on CPU time, memory and output, and without access
to files; the child is kept for later renderings, and replaced when a template crosses a limit.
"""

from __future__ import annotations

import atexit
import datetime
from typing import Any

import msgspec

from inflight.errors import ConfigError, RequestError
from inflight.sandbox.messages import Cause, Limits
from inflight.sandbox.pool import SandboxPool
from inflight.sandbox.process import LimitExceeded, SandboxProcess

MAX_CHARACTERS = 1 << 20
"""Of a rendered text."""

MAX_TEMPLATE_CHARACTERS = 1 << 18
MAX_RENDER_S = 0.2
"""CPU time of one rendering."""

MAX_COMPILE_S = 0.5
"""CPU time of compiling a template, which a child does once."""

_LIMITS = Limits(cpu_s=MAX_COMPILE_S, wall_s=2.0, memory=256 << 20, is_closed=True)
_EXCEEDED: dict[Cause, str] = {
    "time": "takes too long; allowed: "
    f"{MAX_COMPILE_S} s of CPU time to compile, {MAX_RENDER_S} s to render",
    "memory": f"needs too much memory; allowed: {_LIMITS.memory >> 20} MiB",
    "stack": "is nested too deeply",
}


class Conversation(msgspec.Struct, frozen=True):
    """The variables of a chat template that come from a request.

    Attributes:
        messages: objects with `role`, `content` and further members.
        tools: JSON schemas of functions; None without tools.
        variables: further ones, by name.
        add_generation_prompt: append the start of the assistant's turn.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    variables: dict[str, Any] = {}
    add_generation_prompt: bool = True


class Rendering(msgspec.Struct, frozen=True):
    """A job of the sandbox; the attributes are those of `render_each`."""

    template: str
    conversations: list[Conversation]
    bos_token: str = ""
    eos_token: str = ""
    now: datetime.datetime | None = None


class Rendered(msgspec.Struct, frozen=True, tag="rendered"):
    """The text of each conversation."""

    texts: list[str]


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """The error, as its kind and message."""

    kind: str
    message: str


def render(
    template: str,
    messages: list[dict[str, Any]],
    bos_token: str | None,
    eos_token: str | None,
    add_generation_prompt: bool = True,
    now: datetime.datetime | None = None,
) -> str:
    """Render messages with a chat template: `render_each` of one conversation."""
    conversation = Conversation(messages, add_generation_prompt=add_generation_prompt)
    rendering = Rendering(template, [conversation], bos_token or "", eos_token or "", now)
    return render_each(rendering)[0]


def render_each(rendering: Rendering) -> list[str]:
    """Render conversations with a chat template. Thread-safe.

    Args:
        rendering: template: Jinja source. conversations: the limits are those of each. bos_token,
            eos_token: for the template. now: the time for `strftime_now`; None for the current
            time.

    Raises:
        ConfigError: the template is not valid.
        RequestError: the template rejects the messages, fails on them, or exceeds its limits.
        EngineError: there is no sandbox.
    """
    try:
        frame = _sandboxes.run(msgspec.msgpack.encode(rendering))
        answer = msgspec.msgpack.decode(frame, type=Rendered | Refusal)
    except LimitExceeded as error:
        raise _error(_EXCEEDED[error.cause]) from None
    except msgspec.DecodeError:
        raise _error("failed on the messages") from None
    if isinstance(answer, Rendered):
        if len(answer.texts) != len(rendering.conversations):
            raise _error("failed on the messages")
        return answer.texts
    if answer.kind == ConfigError.kind:
        raise ConfigError(answer.message)
    raise RequestError(answer.message.removeprefix("messages: "), "messages")


def warm() -> None:
    """Start a sandbox now, instead of with the first rendering.

    Raises:
        EngineError: it does not start.
    """
    _sandboxes.warm()


def _error(message: str) -> RequestError:
    return RequestError(f"the model's chat template {message}", "messages")


def _sandbox() -> SandboxProcess:
    return SandboxProcess("inflight.text.jinja_sandbox", "chat template", _LIMITS)


_sandboxes = SandboxPool(_sandbox)
atexit.register(_sandboxes.close)
