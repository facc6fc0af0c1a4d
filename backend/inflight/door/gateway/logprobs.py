"""The log-probabilities of tokens, as Triton's models report them."""

from __future__ import annotations

import msgspec

# JSON has no infinities; that of a token that a filter or a mask excludes is below all others.
LOWEST = -9999.0
_INFINITE = '"logprob": -Infinity'


class Candidate(msgspec.Struct, gc=False):
    """A token at a place of the text.

    Attributes:
        rank: 1 for the most probable token; None if it is not known.
        decoded_token: its text.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None

    @property
    def text(self) -> str:
        return self.decoded_token or ""


Place = dict[str, Candidate]
"""By token id: the token itself first, then the most probable ones."""

_DECODER = msgspec.json.Decoder(list[Place | None])


def read(text: str) -> list[Place | None]:
    """The candidates of each token; None for the first token of a prompt.

    Args:
        text: JSON of the tensors `logprobs` and `prompt_logprobs`, or empty.
    """
    if not text:
        return []
    if _INFINITE in text:
        text = text.replace(_INFINITE, f'"logprob": {LOWEST}')
    return _DECODER.decode(text)


def chosen(place: Place) -> Candidate:
    """The token itself."""
    return next(iter(place.values()))


def most_probable(place: Place, count: int) -> list[Candidate]:
    """The `count` most probable tokens, in that order."""
    ranked = [one for one in place.values() if one.rank is not None and one.rank <= count]
    return sorted(ranked, key=lambda one: one.rank or 0)
