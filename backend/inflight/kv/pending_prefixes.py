"""Prefixes that running sequences are computing: a request with the same one does better to wait.

A block is registered in the prefix cache once the step that fills it has been committed. Without
more, all of many requests that arrive together with a common prefix would compute it, as far as
they fit into the steps until then.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Chain
from itertools import takewhile

from inflight.core.sequence import Sequence

WORTH_TOKENS = 256
"""Fewer are computed faster than a step is awaited."""


class PendingPrefixes:
    """Chained hashes of the blocks of prompts that are not in the prefix cache yet.

    Args:
        block_size: tokens per block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._owners: dict[bytes, Sequence] = {}  # by hash: who computes the block

    def __len__(self) -> int:
        return len(self._owners)

    def add(self, sequence: Sequence, hashes: Chain[bytes]) -> None:
        """An admitted sequence computes these blocks, unless another one does already."""
        for key in hashes:
            self._owners.setdefault(key, sequence)

    def remove(self, sequence: Sequence, hashes: Chain[bytes]) -> None:
        """These blocks are in the prefix cache now, or the sequence has lost them."""
        for key in hashes:
            if self._owners.get(key) is sequence:
                del self._owners[key]

    def num_in_flight(
        self, hashes: Chain[bytes], first: int, end_of: Callable[[Sequence], int]
    ) -> int:
        """Tokens of the next blocks of a chain that steps in flight compute.

        Args:
            hashes: of the whole chain.
            first: the first block that is not cached.
            end_of: how many tokens of a sequence are computed with all steps in flight.

        Returns:
            0 if steps that have not been scheduled are needed for a part of them: whoever waits for
            those holds up others.
        """
        shared = list(takewhile(self._owners.__contains__, hashes[first:]))
        if not shared:
            return 0
        end = (first + len(shared)) * self._block_size
        if end_of(self._owners[shared[-1]]) < end:
            return 0
        return len(shared) * self._block_size
