"""Reference implementation of the kernels of `drafting` in numpy, also used on CPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

RESUME_TOKENS, RESUME_AGE = 64, 16
"""A text that has left the passage that it copied up to RESUME_AGE tokens ago resumes it with a
token among the next RESUME_TOKENS of that passage. Without one, a single new token is taken for the
replacement of another."""


MAX_COUNT = 1 << 30
"""More drafts than there are of any text."""


class Copy(NamedTuple):
    """The source of a text's last drafts.

    Attributes:
        start: position of the first of them.
        length: of the text when they were drafted.
    """

    start: int
    length: int


class Match(NamedTuple):
    """An earlier occurrence of the last tokens of a text.

    Attributes:
        start: position of the token after it.
        num_tokens: that match; 0 if the last token replaces another one of a copied passage.
    """

    start: int
    num_tokens: int


class Left(NamedTuple):
    """Where a text has left the passage that it copied.

    Attributes:
        position: of the passage's next token.
        num_tokens: of the text since then.
    """

    position: int
    num_tokens: int


def left_copy(tokens: npt.NDArray[np.int64], copy: Copy | None) -> Left | None:
    """Where a text has left the source of its last drafts, or is about to: None if it had none, or
    left it more than RESUME_AGE tokens ago."""
    if copy is None:
        return None
    new = tokens[copy.length : copy.length + RESUME_TOKENS]
    differ = np.flatnonzero(new != tokens[copy.start : copy.start + len(new)])
    num_copied = int(differ[0]) if len(differ) else len(new)
    num_since = len(tokens) - copy.length - num_copied
    return None if num_since > RESUME_AGE else Left(copy.start + num_copied, num_since)


def find_match(
    tokens: npt.NDArray[np.int64], max_match: int, min_match: int, left: Left | None = None
) -> Match | None:
    """The longest earlier occurrence of the last tokens, from max_match tokens down to min_match;
    of equally long ones the latest.

    Of those that end within RESUME_TOKENS from where a copy was left, one token is enough, and the
    first goes before any other that is as long. If none matches, and the copy was left with the
    last token, this is taken for the replacement of the passage's.

    Args:
        tokens: [length].
        max_match, min_match: tokens that must match.
        left: see `left_copy`.
    """
    length = len(tokens)
    # Ends of earlier matches: positions of the last token, then those whose predecessors match.
    ends = np.flatnonzero(tokens[: length - 1] == tokens[length - 1]) if length else tokens
    best: Match | None = None
    for matched in range(1, max_match + 1):
        if matched > 1:
            ends = ends[ends >= matched - 1]
            ends = ends[tokens[ends - matched + 1] == tokens[length - matched]]
        if not len(ends):
            break
        near = ends[:0]
        if left is not None:
            near = ends[(ends >= left.position) & (ends < left.position + RESUME_TOKENS)]
        if len(near):
            best = Match(int(near[0]) + 1, matched)
        elif matched >= min_match:
            best = Match(int(ends[-1]) + 1, matched)
    if best is None and left is not None and left.num_tokens == 1 and left.position + 1 < length:
        return Match(left.position + 1, 0)
    return best


def continuation(
    tokens: Sequence[int] | npt.NDArray[np.int64], start: int, count: int
) -> list[int]:
    """`count` tokens from `start` on; where the text ends, those from `start` on again."""
    distance = len(tokens) - start
    return [int(tokens[start + i % distance]) for i in range(count)]


def propose(
    tokens: npt.NDArray[np.int64],
    max_match: int,
    min_match: int,
    count: int,
    *,
    per_match: int = 0,
    max_resumed: int = MAX_COUNT,
    copy: Copy | None = None,
) -> tuple[list[int], Copy | None]:
    """Drafts of a text: the tokens after the match that `find_match` finds.

    Args:
        tokens, max_match, min_match: see `find_match`.
        count: tokens to draft.
        per_match: tokens at most for each one that matches; 0 for no such limit.
        max_resumed: tokens at most after a match of fewer than min_match tokens.
        copy: the source of its drafts before, which it may resume.

    Returns:
        `count` tokens, fewer if too few match, or none; and the source of its last drafts that
        followed a match.
    """
    match = find_match(tokens, max_match, min_match, left_copy(tokens, copy))
    if match is None:
        return [], copy
    if match.num_tokens < min_match:
        count = min(count, max_resumed)
    if per_match:
        count = min(count, per_match * match.num_tokens)
    if match.num_tokens:
        copy = Copy(match.start, len(tokens))
    return continuation(tokens, match.start, count), copy
