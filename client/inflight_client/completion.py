"""What comes back."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Delta:
    """One response of a stream.

    Attributes:
        text: what is new; the texts of all deltas, joined, are the whole output.
        finish_reason: `stop`, `length` or `cancelled` in the last one, None before.
        num_input_tokens: of the prompt; the same in each.
        num_output_tokens: of this response alone. One response may carry several tokens.
    """

    text: str
    finish_reason: str | None
    num_input_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole output.

    Attributes:
        text: the output without the prompt, unless `exclude_input_in_output=False` was asked for.
        finish_reason: `stop`, `length` or `cancelled`.
        num_input_tokens: of the prompt, chat template included.
        num_output_tokens: of the output.
    """

    text: str
    finish_reason: str
    num_input_tokens: int
    num_output_tokens: int
