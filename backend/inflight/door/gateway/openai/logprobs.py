"""Log-probabilities in OpenAI's two forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inflight.door.gateway import logprobs
from inflight.door.gateway.generation import Delta
from inflight.door.gateway.logprobs import Candidate, Place, chosen, most_probable


def chat_logprobs(places: Sequence[Place | None], num_top: int) -> list[dict[str, Any]]:
    """`logprobs.content` of a chat."""
    return [
        _entry(chosen(one))
        | {"top_logprobs": [_entry(candidate) for candidate in most_probable(one, num_top)]}
        for one in places
        if one is not None
    ]


def by_token(delta: Delta, num_top: int) -> list[tuple[Delta, list[dict[str, Any]]]]:
    """A delta as one for each of its tokens, and the log-probabilities of the token.

    A character that consists of several tokens is in the delta of the next token.
    """
    places = [one for one in logprobs.read(delta.logprobs) if one is not None]
    if not places:
        return [(delta, [])]
    found = []
    rest = delta.text_output
    length = 0  # at most, of the text of the tokens whose text was not found
    for place in places:
        text = chosen(place).text
        length += len(text)
        start = rest.find(text, 0, length)
        end = start + len(text) if start >= 0 else 0
        length = 0 if end else length
        part = Delta(rest[:end], delta.index, num_output_tokens=1)
        rest = rest[end:]
        found.append((part, chat_logprobs([place], num_top)))
    last = found[-1][0]
    last.text_output += rest
    last.finish_reason = delta.finish_reason
    return found


def _entry(one: Candidate) -> dict[str, Any]:
    return {"token": one.text, "logprob": one.logprob, "bytes": list(one.text.encode())}


class CompletionLogprobs:
    """`logprobs` of a completion, part by part.

    Args:
        num_top: how many of the most probable tokens are reported.
    """

    def __init__(self, num_top: int) -> None:
        self._num_top = num_top
        self._offset = 0

    def part(self, places: Sequence[Place | None], first: str = "") -> dict[str, Any]:
        """Of the next tokens.

        Args:
            first: text of a prompt's first token, which has no logprob.
        """
        tokens = [first if one is None else chosen(one).text for one in places]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [None if one is None else chosen(one).logprob for one in places],
            "top_logprobs": [None if one is None else self._top(one) for one in places],
            "text_offset": offsets,
        }

    def _top(self, place: Place) -> dict[str, float]:
        # The token itself is always there, with the identical number: clients compare the two.
        found = {one.text: one.logprob for one in reversed(most_probable(place, self._num_top))}
        own = chosen(place)
        return {**found, own.text: own.logprob}


def first_text(places: Sequence[Place | None], text: str) -> str:
    """The text of a prompt's first token: what precedes all others in the echoed text."""
    others = "".join(chosen(one).text for one in places if one is not None)
    place = text.find(others)
    return text[:place] if place > 0 else ""
