"""How many KV blocks running groups will need at the worst time to come.

Groups grow by a token per step until they end, and then give their blocks back. An admission is
safe if the usage fits into the pool at all later times: what counts is its peak, which is far below
the sum of what each group takes at its own end. That is the idea of the past-future scheduler (Gong
et al., ASPLOS 2025, arXiv:2507.10150), which draws each length from those of the past. Here, mean
and variance of the usage are computed instead, from the probability that a group still runs: the
margin is that of the sum, and with more groups it is a smaller part of the pool.
"""

from __future__ import annotations

import math
from collections.abc import Sized

import numpy as np

from inflight.core.sequence import Sequence, SequenceGroup
from inflight.kv.layout import KVTables
from inflight.scheduling.output_lengths import CERTAIN, Ints, OutputLengths
from inflight.scheduling.waiting_queue import key_of

# Standard deviations of the usage above its mean. A preemption follows if the usage exceeds the
# pool at any time, which is more probable than that it does so at the worst one.
_MARGIN = 3.0
# The times to look at: multiples of a mean output, and ends of running groups, evenly chosen.
_MULTIPLES = np.array([0.0, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0, 1.5, 2.5])
_NUM_ENDS = 3
# While no group comes or goes, an answer holds for so many admissions that were considered.
_MAX_AGE = 16


class KVForecast:
    """Expected usage of the pool by the running groups, as they grow and end.

    Not accounted for: how long prompts take to compute, and drafts that are accepted. A block that
    several groups share counts as that of the first one.

    Args:
        kv_tables: the block tables of each sequence.
        max_num_seqs: maximum running groups.
        max_blocks: the most that it keeps free. To wait for a pool that fits all of a few groups
            with spread lengths would cost more than the preemptions do, and groups of one length
            would always start and end together.
        lengths: of outputs; by default it has seen none.
    """

    def __init__(
        self,
        kv_tables: KVTables,
        max_num_seqs: int,
        max_blocks: int,
        lengths: OutputLengths | None = None,
    ) -> None:
        self._lengths = OutputLengths() if lengths is None else lengths
        self._kv_tables = kv_tables
        self._tables = tuple(zip(kv_tables.tables, kv_tables.spans, strict=True))
        self._max_blocks = max_blocks
        self._num_uncertain = 0  # running groups that may end before their limit
        self._answer: tuple[int, int] | None = None  # request, blocks: until a group comes or goes
        self._age = 0  # how often it was given
        # By running group, in any order, with room for the one that may be admitted.
        size = max_num_seqs + 1
        self._places: dict[int, int] = {}
        self._ids: list[int] = []
        self._tokens: list[Sized] = []
        self._rows = np.zeros(size, np.int32)  # of OutputLengths
        self._prompts = np.zeros(size, np.int32)  # tokens
        self._limits = np.zeros(size, np.int32)  # tokens of prompt and output
        self._widths = np.ones(size, np.int32)
        self._shared = np.zeros(size, np.int32)  # blocks that others had before

    def blocks_for(self, group: SequenceGroup, num_free: int) -> int:
        """Blocks to leave free if a group is admitted to those that run, besides its own.

        Args:
            group: that may be admitted.
            num_free: free blocks in the pool.

        Returns:
            At most max_blocks. 0 if that many are free in any case, or if too few requests have
            ended to know their lengths.
        """
        own = group.width * self._kv_tables.num_blocks(group.members[0].num_tokens)
        if num_free - own >= self._max_blocks:
            return 0
        if self._answer is None or self._answer[0] != group.request_id or self._age == _MAX_AGE:
            self._answer, self._age = (group.request_id, self._forecast(group)), 0
        self._age += 1
        return self._answer[1]

    def add(self, group: SequenceGroup, num_shared: int) -> None:
        """A group was admitted; num_shared: blocks of it that others had before."""
        self._answer = None
        place = self._places[group.request_id] = len(self._ids)
        self._ids.append(group.request_id)
        self._tokens.append(_tokens_of(group))
        self._write(place, group, num_shared)
        self._num_uncertain += int(self._rows[place] != CERTAIN)

    def remove(self, group: SequenceGroup) -> None:
        """A group runs no longer."""
        self._answer = None
        place = self._places.pop(group.request_id)
        self._num_uncertain -= int(self._rows[place] != CERTAIN)
        last_id, last_tokens = self._ids.pop(), self._tokens.pop()
        last = len(self._ids)
        if place < last:
            self._ids[place], self._tokens[place] = last_id, last_tokens
            self._places[last_id] = place
            for column in (self._rows, self._prompts, self._limits, self._widths, self._shared):
                column[place] = column[last]

    def ended(self, group: SequenceGroup) -> None:
        """A running group has ended, or was cancelled: learn from its length."""
        place = self._places[group.request_id]
        if self._rows[place] != CERTAIN:
            num_tokens = group.num_output_tokens or group.num_steps
            most = int(self._limits[place] - self._prompts[place])
            self._lengths.observe(key_of(group), num_tokens, is_cut=num_tokens >= most)

    def _write(self, place: int, group: SequenceGroup, num_shared: int) -> None:
        row = CERTAIN if _is_certain(group) else self._lengths.row_of(key_of(group))
        self._rows[place] = row
        self._prompts[place] = group.num_prompt_tokens
        self._limits[place] = group.members[0].max_length
        self._widths[place] = group.width
        self._shared[place] = num_shared

    def _forecast(self, group: SequenceGroup) -> int:
        place = len(self._ids)
        self._write(place, group, 0)
        num_uncertain = self._num_uncertain + int(self._rows[place] != CERTAIN)
        if num_uncertain and not self._lengths.is_known:
            return 0
        return min(self._growth([*self._tokens, _tokens_of(group)]), self._max_blocks)

    def _growth(self, tokens: list[Sized]) -> int:
        """By how many blocks the usage will exceed the present one, if these are all that run."""
        count = len(tokens)
        now = np.fromiter(map(len, tokens), np.int32, count)
        rows, widths, shared = self._rows[:count], self._widths[:count], self._shared[:count]
        outputs, left = now - self._prompts[:count], self._limits[:count] - now
        times = self._times(left)
        # By time and group: the probability that it has not ended before its limit, its blocks if
        # it has not, and what is expected of them.
        runs = self._lengths.survival(rows, outputs + times)
        runs = runs / runs[0]
        held = self._num_blocks(now + times)
        if widths.max() > 1:  # all beams grow; how much of the rest they share is not known
            held = held * widths - held[0] * (widths - 1)
        blocks = ((held - shared) * (times < left)).astype(np.float32)
        expected = runs * blocks
        deviations = np.sqrt(((blocks - expected) * expected).sum(1))
        usage = np.minimum(expected.sum(1) + _MARGIN * deviations, blocks.sum(1))
        return math.ceil(float(usage.max() - usage[0]))

    def _times(self, left: Ints) -> Ints:
        """Steps from now, 0 first, of shape [times, 1]; left: tokens to the limit of each group."""
        means = (_MULTIPLES * self._lengths.mean).astype(np.int32)
        ends = np.maximum(0, np.sort(left)[:: -max(1, len(left) // _NUM_ENDS)] - 1)
        times: Ints = np.concatenate((means, ends))[:, None]
        return times

    def _num_blocks(self, num_tokens: Ints) -> Ints:
        """`KVTables.num_kept_blocks` of each element."""
        total: Ints = np.zeros_like(num_tokens)
        for table, span in self._tables:
            blocks = -(-num_tokens // span)
            if table.window:
                tile = table.tile_tokens
                blocks -= np.maximum(0, num_tokens - table.window) // tile * tile // span
            total += blocks
        return total


class _FirstBeam(Sized):
    """The tokens of a search's beams, which are of equal length."""

    def __init__(self, group: SequenceGroup) -> None:
        self._group = group

    def __len__(self) -> int:
        return len(self._group.members[0].token_ids)


def _tokens_of(group: SequenceGroup) -> Sized:
    return group.token_ids if isinstance(group, Sequence) else _FirstBeam(group)


def _is_certain(group: SequenceGroup) -> bool:
    """Whether only the limit ends its output."""
    params = group.request.params
    return params.ignore_eos and not params.stop_token_ids and not params.stop_words
