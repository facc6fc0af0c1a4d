"""Reference implementation of the kernels of `drafting` in numpy, also used on CPUs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def latest_match(
    tokens: npt.NDArray[np.int64],
    max_match: int,
    min_match: int,
    count: int,
    per_match: int = 0,
) -> list[int]:
    """The tokens after the latest earlier occurrence of the last tokens.

    The longest match wins, from max_match tokens down to min_match; among equally long ones the
    latest. If the continuation reaches the end, it repeats.

    Args:
        tokens: [length].
        max_match, min_match: tokens that must match.
        count: tokens to draft.
        per_match: tokens at most for each one that matches; 0 for no such limit.

    Returns:
        `count` tokens, fewer if too few match, or none.
    """
    length = len(tokens)
    # Ends of earlier matches: positions of the last token, then those whose predecessors match.
    ends = np.flatnonzero(tokens[: length - 1] == tokens[length - 1]) if length else tokens
    best: npt.NDArray[np.int64] | None = None
    num_matched = 0
    for matched in range(1, max_match + 1):
        if matched > 1:
            ends = ends[ends >= matched - 1]
            ends = ends[tokens[ends - matched + 1] == tokens[length - matched]]
        if not len(ends):
            break
        if matched >= min_match:
            best, num_matched = ends, matched
    if best is None:
        return []
    start = int(best[-1]) + 1
    distance = length - start
    if per_match:
        count = min(count, per_match * num_matched)
    return [int(tokens[start + i % distance]) for i in range(count)]
