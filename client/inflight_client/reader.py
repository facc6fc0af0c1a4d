"""From a stream's messages to deltas, without I/O."""

from __future__ import annotations

from typing import Any

from inflight_client import errors, tensors
from inflight_client.completion import Delta, read_logprobs


class Reader:
    """Reads the messages of one request and checks that each output is complete.

    Args:
        num_outputs: number of outputs requested.
    """

    def __init__(self, num_outputs: int) -> None:
        self._num_outputs = num_outputs
        self._num_finished = 0

    def feed(self, message: Any) -> list[Delta]:
        """The deltas of one ModelStreamInferResponse; none for an empty final one.

        Raises:
            ClientError: the message is an error, or cannot be read.
        """
        if message.error_message:
            raise errors.from_message(message.error_message)
        deltas = self._deltas(tensors.outputs(message.infer_response))
        self._num_finished += sum(delta.finish_reason is not None for delta in deltas)
        return deltas

    def end(self) -> list[Delta]:
        """The stream has ended without an error; the deltas that this implies.

        Raises:
            ServerError: an output is incomplete.
        """
        if self._num_finished < self._num_outputs:
            raise errors.ServerError("the stream ended before its last response")
        return []

    def _deltas(self, values: dict[str, list[Any]]) -> list[Delta]:
        """Of the values of a response's outputs; layouts differ in them."""
        texts = values.get("text_output", [])

        def of(name: str, otherwise: Any) -> list[Any]:
            return values.get(name) or [otherwise] * len(texts)

        (num_input_tokens, *_) = values.get("num_input_tokens", [0])
        (of_prompt, *_) = values.get("prompt_logprobs", [""])
        # There is one prompt for all outputs.
        of_prompts = [of_prompt] + [""] * (len(texts) - 1)
        return [
            Delta(
                text,
                reason or None,
                num_input_tokens,
                count,
                read_logprobs(logprobs),
                index,
                read_logprobs(prompt_logprobs, "prompt_logprobs"),
            )
            for text, reason, count, logprobs, index, prompt_logprobs in zip(
                texts,
                of("finish_reason", ""),
                of("num_output_tokens", 0),
                of("logprobs", ""),
                of("index", 0),
                of_prompts[: len(texts)],
                strict=True,
            )
        ]
