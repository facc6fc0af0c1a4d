"""What a layout defines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from inflight_client.errors import InvalidRequest
from inflight_client.option_table import DATATYPES
from inflight_client.options import PROMPT_INPUTS, no_option
from inflight_client.reader import Reader

Prompt = str | Sequence[int]
"""Text, or token ids."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One request.

    Attributes:
        request: a ModelInferRequest.
        reader: makes a reader of its responses, one for each attempt.
    """

    request: Any
    reader: Callable[[], Reader]


@dataclass(frozen=True, slots=True)
class Target:
    """A model, and its version or "" for the highest."""

    model: str
    version: str


class Layout(Protocol):
    """Attributes:
    name: of the layout.
    models: of a server with this layout, in the order of preference.
    """

    name: str
    models: tuple[str, ...]

    def generate(
        self, target: Target, prompt: Prompt, stream: bool, options: Mapping[str, Any]
    ) -> Generation:
        """The request to complete a prompt.

        Raises:
            InvalidRequest: the layout cannot express it.
        """
        ...


def refused(name: str, layout: str, remedy: str = "") -> InvalidRequest:
    """The error for an option that a layout cannot express, or that does not exist."""
    known = [*DATATYPES, "logit_bias"]
    if name not in (*known, *PROMPT_INPUTS):
        return no_option(name, known)
    return InvalidRequest(
        f"{name}: is not supported by the layout {layout}{remedy and f'; {remedy}'}"
    )


def refuse_token_ids(prompt: Prompt, layout: str) -> None:
    """Raises InvalidRequest: the prompt is token ids."""
    if isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes):
        raise InvalidRequest(f"prompt: token ids are not supported by the layout {layout}")
