"""What comes back."""

from __future__ import annotations

import json
from dataclasses import dataclass

from inflight_client.errors import ServerError


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that might stand at a place in the text, and what the model thinks of it.

    Attributes:
        token_id: the token.
        logprob: its log-probability, before penalties, biases and temperature.
        rank: 1 for the likeliest.
        text: its text by itself.
    """

    token_id: int
    logprob: float
    rank: int
    text: str


Logprobs = tuple[tuple[Candidate, ...], ...]
"""For each token of an output or a prompt: itself, then the likeliest ones but for itself. Nothing
for the first token of a prompt."""


@dataclass(frozen=True, slots=True)
class Delta:
    """One response of a stream.

    Attributes:
        text: what is new; the texts of all deltas, joined, are the whole output.
        finish_reason: `stop`, `length` or `cancelled` in the last one, None before.
        num_input_tokens: of the prompt; the same in each.
        num_output_tokens: of this response alone. One response may carry several tokens.
        logprobs: of these tokens, where num_logprobs was asked for.
        index: of n outputs, the one that this belongs to.
        prompt_logprobs: of the prompt's next tokens, where num_prompt_logprobs or echo asked for
            them: from the first output token on, all have come.
    """

    text: str
    finish_reason: str | None
    num_input_tokens: int
    num_output_tokens: int
    logprobs: Logprobs = ()
    index: int = 0
    prompt_logprobs: Logprobs = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole output.

    Attributes:
        text: the output without the prompt, unless `echo=True` was asked for.
        finish_reason: `stop`, `length` or `cancelled`.
        num_input_tokens: of the prompt, chat template included.
        num_output_tokens: of the output.
        logprobs: of its tokens, where num_logprobs was asked for.
        prompt_logprobs: of the prompt's tokens, where num_prompt_logprobs or echo asked for them;
            of several outputs the first has them.
    """

    text: str
    finish_reason: str
    num_input_tokens: int
    num_output_tokens: int
    logprobs: Logprobs = ()
    prompt_logprobs: Logprobs = ()


def joined(deltas: list[Delta]) -> Completion:
    """The deltas of one output, all of them, as a whole."""
    return Completion(
        text="".join(delta.text for delta in deltas),
        finish_reason=deltas[-1].finish_reason or "",
        num_input_tokens=deltas[-1].num_input_tokens,
        num_output_tokens=sum(delta.num_output_tokens for delta in deltas),
        logprobs=tuple(one for delta in deltas for one in delta.logprobs),
        prompt_logprobs=tuple(one for delta in deltas for one in delta.prompt_logprobs),
    )


def read_logprobs(text: str, output: str = "logprobs") -> Logprobs:
    """The output `logprobs`, or another one like it: a JSON list of {id: {logprob, rank,
    decoded_token}} or null, or nothing.

    Raises:
        ServerError: it is something else.
    """
    if not text:
        return ()
    try:
        return tuple(
            tuple(
                Candidate(int(token_id), one["logprob"], one["rank"], one["decoded_token"])
                for token_id, one in ({} if of_token is None else of_token).items()
            )
            for of_token in json.loads(text)
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ServerError(f"output {output} cannot be read ({error!r})") from None
