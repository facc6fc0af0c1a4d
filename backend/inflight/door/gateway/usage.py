"""Token counts of a response."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from inflight.door.gateway.generation import Delta


class _Timing(msgspec.Struct):
    num_cached_tokens: int = 0


class _Stats(msgspec.Struct):
    timing: _Timing | None = None


class Usage:
    """Counts the tokens of all outputs of a request.

    Args:
        num_outputs: of each prompt.

    Attributes:
        num_output_tokens: of all outputs.
    """

    def __init__(self, num_outputs: int = 1) -> None:
        self._num_outputs = num_outputs
        self._prompts: dict[int, int] = {}
        self._cached: dict[int, int] = {}
        self.num_output_tokens = 0

    @property
    def num_input_tokens(self) -> int:
        """Of all prompts."""
        return sum(self._prompts.values())

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens from the prefix cache; known once the outputs have ended."""
        return sum(self._cached.values())

    def add(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            self.num_output_tokens += delta.num_output_tokens
            prompt, output = divmod(delta.index, self._num_outputs)
            self._prompts[prompt] = delta.num_input_tokens
            if delta.draft_stats and output == 0:  # the others share its prompt
                timing = msgspec.json.decode(delta.draft_stats, type=_Stats).timing
                self._cached[prompt] = timing.num_cached_tokens if timing is not None else 0
