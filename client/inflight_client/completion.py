"""Results: deltas, completions and logprobs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from inflight_client.errors import ServerError


@dataclass(frozen=True, slots=True)
class Candidate:
    """A candidate token at a position, with its log-probability.

    Attributes:
        token_id: the token.
        logprob: its log-probability, before penalties, biases and temperature.
        rank: 1 for the most probable token.
        text: its text.
    """

    token_id: int
    logprob: float
    rank: int
    text: str


Logprobs = tuple[tuple[Candidate, ...], ...]
"""For each token of an output or a prompt: the token itself, then the most probable other ones.
Empty for the first token of a prompt."""


@dataclass(frozen=True, slots=True)
class Delta:
    """One response of a stream.

    Attributes:
        text: new text; the texts of all deltas concatenated are the whole output.
        finish_reason: `stop`, `length` or `cancelled` in the last one, None before.
        num_input_tokens: of the prompt; the same in each.
        num_output_tokens: of this response only; may be more than one.
        logprobs: of these tokens, if num_logprobs was set.
        index: of the output, if there are several.
        prompt_logprobs: of the prompt's next tokens, if num_prompt_logprobs or echo was set; all
            have arrived by the first output token.
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
        text: the output, without the prompt unless `echo=True`.
        finish_reason: `stop`, `length` or `cancelled`.
        num_input_tokens: of the prompt, chat template included.
        num_output_tokens: of the output.
        logprobs: of its tokens, if num_logprobs was set.
        prompt_logprobs: of the prompt's tokens, if num_prompt_logprobs or echo was set; only in the
            first of several outputs.
    """

    text: str
    finish_reason: str
    num_input_tokens: int
    num_output_tokens: int
    logprobs: Logprobs = ()
    prompt_logprobs: Logprobs = ()


def joined(deltas: Sequence[Delta]) -> list[Completion]:
    """One completion per output, in order.

    Raises:
        ServerError: there are no deltas.
    """
    if not deltas:
        raise ServerError("the stream has already been read to its end")
    by_output: dict[int, list[Delta]] = {}
    for delta in deltas:
        by_output.setdefault(delta.index, []).append(delta)
    return [_joined(own) for _, own in sorted(by_output.items())]


def _joined(deltas: Sequence[Delta]) -> Completion:
    """All deltas of one output."""
    return Completion(
        text="".join(delta.text for delta in deltas),
        finish_reason=deltas[-1].finish_reason or "",
        num_input_tokens=deltas[-1].num_input_tokens,
        num_output_tokens=sum(delta.num_output_tokens for delta in deltas),
        logprobs=tuple(one for delta in deltas for one in delta.logprobs),
        prompt_logprobs=tuple(one for delta in deltas for one in delta.prompt_logprobs),
    )


def read_logprobs(text: str, output: str = "logprobs") -> Logprobs:
    """Parse the output `logprobs` or one of the same format: a JSON list of {id: {logprob, rank,
    decoded_token}} or null, or "".

    Raises:
        ServerError: invalid format.
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
