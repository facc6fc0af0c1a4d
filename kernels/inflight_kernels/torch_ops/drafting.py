"""What the kernels of `drafting` are to do, in numpy; the path on a CPU as well."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def latest_match(
    tokens: npt.NDArray[np.int64], max_match: int, min_match: int, count: int
) -> list[int]:
    """What follows the latest earlier occurrence of the last tokens.

    The longest match counts, from max_match tokens down to min_match; among equally long ones the
    latest. It may run into the end: then what is drafted repeats.

    Args:
        tokens: [length].
        max_match, min_match: tokens that must agree.
        count: tokens to draft.

    Returns:
        `count` tokens, or none.
    """
    length = len(tokens)
    # Ends of earlier matches: places of the last token, then those whose neighbours agree too.
    ends = np.flatnonzero(tokens[: length - 1] == tokens[length - 1]) if length else tokens
    best: npt.NDArray[np.int64] | None = None
    for matched in range(1, max_match + 1):
        if matched > 1:
            ends = ends[ends >= matched - 1]
            ends = ends[tokens[ends - matched + 1] == tokens[length - matched]]
        if not len(ends):
            break
        if matched >= min_match:
            best = ends
    if best is None:
        return []
    start = int(best[-1]) + 1
    distance = length - start
    return [int(tokens[start + i % distance]) for i in range(count)]
