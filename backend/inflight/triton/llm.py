"""Triton's model `llm`: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inflight.core.request import TokenEvent
from inflight.triton import contract, protocol
from inflight.triton.contract import Array
from inflight.triton.engine_front import Call, EngineFront


class LlmResponseBuilder:
    """Responses of the model `llm`, see `protocol.outputs`."""

    num_responses = 1

    def __init__(self, generation: protocol.Generation) -> None:
        self._generation = generation
        self._echoed: set[int] = set()

    def responses(
        self, events: list[TokenEvent], request_ids: list[int]
    ) -> list[Mapping[str, Array]]:
        # One output carries the prompt's logprobs, and it may not be among the best.
        prompt_candidates = [one for event in events for one in event.prompt_candidates]
        generation = self._generation
        parts = generation.answer([self._delta(event, request_ids) for event in events])
        found = protocol.outputs(
            parts, len(generation.prompt_ids), prompt_candidates, generation.kept
        )
        return [found]

    def _delta(self, event: TokenEvent, request_ids: list[int]) -> protocol.OutputDelta:
        output = event.request_id
        echo = (
            self._generation.prompt_ids
            if self._generation.echo and output not in self._echoed
            else []
        )
        self._echoed.add(output)
        return protocol.OutputDelta(request_ids.index(output), event, echo)


class LlmFront(EngineFront):
    """Triton's model `llm`. Args and Raises: see `EngineFront`."""

    def check(self, inputs: Mapping[str, Array]) -> None:
        refused = inputs.get(contract.PROMPT_ERROR.name)
        if refused is not None:  # the tokenizer has rejected the request
            raise protocol.read_error(contract.PROMPT_ERROR, refused)

    def read(
        self, inputs: Mapping[str, Array], parameters: dict[str, Any], limits: protocol.Limits
    ) -> Call:
        generation = protocol.parse(inputs, parameters, limits)
        return Call(generation, LlmResponseBuilder(generation))
