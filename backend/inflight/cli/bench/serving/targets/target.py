"""The seam between the load generator and a server's protocol."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

CONTEXT = "max_model_len"
"""Fact of a target: tokens of a prompt and its output together."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request of a load.

    Attributes:
        text: of the prompt.
        output_len: number of output tokens; the end-of-sequence token is ignored.
    """

    text: str
    output_len: int


class Arrival(NamedTuple):
    """What arrived from the server at one moment.

    Attributes:
        at: `time.perf_counter()` when it was read.
        num_tokens: output tokens, as far as the server reports them.
        num_input_tokens: of the prompt; 0 if not reported yet.
        num_output_tokens: of the whole output; 0 if not reported. If it differs from the sum of all
            `num_tokens`, the server does not report tokens by response.
    """

    at: float
    num_tokens: int
    num_input_tokens: int = 0
    num_output_tokens: int = 0


class Target(Protocol):
    """A model on a server, for one event loop."""

    def send(self, prompt: Prompt) -> AsyncGenerator[Arrival, None]:
        """Send a request, greedy and streamed; closing the generator cancels it.

        Raises:
            ClientError: the request failed (see `inflight_client.errors`).
        """
        ...

    async def describe(self) -> dict[str, str]:
        """What is served: at least `endpoint`, `url` and `model`; CONTEXT if the server reports it.

        Raises:
            ClientError: the server does not respond, or does not have the model.
        """
        ...

    async def aclose(self) -> None: ...
