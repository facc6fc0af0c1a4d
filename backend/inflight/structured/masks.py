"""The tokens that a batch may take next, as bits: one row for each sequence and position."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from inflight.errors import EngineError
from inflight.structured.matcher import Matcher, guarded
from inflight.structured.vocabulary import Vocabulary

Rows = NDArray[np.int32]

MAX_WHITESPACE_BYTES = 64
"""White space on end in JSON, where any amount is allowed: some models never come back from it.
Bounding it in the grammar would cost three times as much: each count is a state of its own."""

MAX_MASK_S = 0.02
"""Processor time of one mask. A grammar that takes more, after all that its sandbox and the
library's limits let pass, fails: the others in its batch would wait for it at every step."""


class MaskFiller:
    """Fills masks one after the other, on the thread that asks for them.

    A mask takes some 10 us, and copies of a grammar wait for each other's lexer: threads cost more
    than they bring, for 256 sequences too. The library lets go of the interpreter's lock for each
    mask, so that another thread of the caller's gets on meanwhile.

    Args:
        vocabulary: of the model.

    Attributes:
        num_words: int32 of a row.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._is_slow = False  # whether some mask was: then the next batch looks for the reason
        self.num_words = vocabulary.num_words
        self._stop_id = vocabulary.stop_id
        self._model_ends = vocabulary.end_ids
        bits = np.ones(self.num_words * 32, np.uint8)
        bits[list(vocabulary.whitespace)] = 0
        self._non_whitespace = np.packbits(bits, bitorder="little").view(np.int32)
        # Ids that the model has beyond its tokenizer's: a grammar can name them by number.
        bits = np.ones(self.num_words * 32, np.uint8)
        bits[: vocabulary.num_used] = 0
        self._first_padded = vocabulary.num_used // 32
        self._unused = np.packbits(bits, bitorder="little").view(np.int32)[self._first_padded :]

    def fill(
        self,
        matchers: Sequence[Matcher],
        out: Rows,
        drafts: Sequence[Sequence[int]] | None = None,
    ) -> dict[int, EngineError]:
        """Write which tokens may come next.

        Args:
            matchers: no one twice.
            out: [rows, ceil(vocab_size / 32)] int32, C-contiguous; bit i % 32 of word i // 32 says
                whether token i is allowed. Without drafts, row r is that of matcher r.
            drafts: for each matcher, tokens that may turn out to come next. It then has
                1 + len(draft) rows, one after the other, behind those of the matchers before it:
                the first as without a draft, each further one for when the draft is right so far.
                Rows behind a draft token that does not fit, or that ends the output, allow all:
                what is drawn there cannot count.

        Returns:
            For each matcher that failed its index and the reason. Its rows allow all tokens, so
            that a sampler finds what it needs.

        Raises:
            ValueError: `out` is not what it has to be.
        """
        starts: Sequence[int] = range(len(matchers) + 1)
        if drafts is not None:
            starts = [0, *itertools.accumulate(1 + len(draft) for draft in drafts)]
        self._check(out, starts[-1])
        if not matchers:
            return {}
        rows = out[: starts[-1]]
        suspects = self._fill_all(matchers, rows, starts, drafts)
        failures: dict[int, EngineError] = {}
        for index in suspects:
            own = rows[starts[index] : starts[index + 1]]
            try:
                self._fill_one(matchers[index], own, drafts[index] if drafts is not None else ())
            except EngineError as error:
                failures[index] = error
        padded = rows[:, self._first_padded :]
        named = False
        if not all(matcher.is_json for matcher in matchers):  # no schema names a token by number
            named = bool((padded & self._unused).any())
        if named:
            padded &= ~self._unused
        for index, matcher in enumerate(matchers):
            if matcher.num_whitespace_bytes >= MAX_WHITESPACE_BYTES and matcher.is_json:
                self._ban_whitespace(rows[starts[index]])
            if matcher.has_own_ends and index not in failures:
                for row in rows[starts[index] : starts[index + 1]]:
                    self._replace_ends(row, matcher.end_ids)
            if (named or matcher.has_own_ends) and not rows[starts[index]].any():
                failures[index] = EngineError(
                    "the request's grammar allows neither another token nor an end"
                )
        for index in failures:
            rows[starts[index] : starts[index + 1]] = -1
        return failures

    def _ban_whitespace(self, row: Rows) -> None:
        """Allow no further whitespace, where anything else is allowed."""
        rest = row & self._non_whitespace
        if rest.any():
            row[:] = rest

    def _check(self, out: Rows, num_rows: int) -> None:
        good = out.dtype == np.int32 and out.ndim == 2 and out.flags.c_contiguous
        if not good or out.shape[1] != self.num_words or out.shape[0] < num_rows:
            raise ValueError(
                f"masks: {out.dtype} {list(out.shape)}; it has to be int32, C-contiguous, of "
                f"[{num_rows} or more, {self.num_words}]"
            )

    def _fill_all(
        self,
        matchers: Sequence[Matcher],
        rows: Rows,
        starts: Sequence[int],
        drafts: Sequence[Sequence[int]] | None,
    ) -> list[int]:
        """Fill what goes well; the indices of what is to be done one by one."""
        if self._is_slow:
            self._is_slow = False
            return list(range(len(matchers)))
        suspects = []
        base, size = rows.ctypes.data, self.num_words * 4
        ended_s = time.perf_counter()
        for index, matcher in enumerate(matchers):
            state, start = matcher.state, starts[index]
            try:
                if drafts is not None and drafts[index]:
                    rows[start : starts[index + 1]].fill(-1)
                    body = matcher.before_end(drafts[index])
                    # The library's stub knows it for executors only.
                    state.unsafe_compute_mask_ptr_with_draft_token(  # type: ignore[attr-defined]
                        base + start * size, size, body
                    )
                else:
                    state.unsafe_compute_mask_ptr(base + start * size, size)
                if matcher.has_ended or state.is_error():
                    suspects.append(index)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException:  # a panic; what became of its rows shows one by one
                suspects.append(index)
            started_s, ended_s = ended_s, time.perf_counter()
            if ended_s - started_s > MAX_MASK_S:
                self._is_slow = True
        return suspects

    def _fill_one(self, matcher: Matcher, rows: Rows, draft: Sequence[int]) -> None:
        rows.fill(-1)
        if matcher.has_ended:
            rows[0] = 0
            _set(rows[0], matcher.end_ids or [self._stop_id], True)
            return
        taken = 0
        try:
            for position, row in enumerate(rows):
                self._fill_row(matcher, row)
                if position == len(rows) - 1 or matcher.count_accepted([draft[position]]) == 0:
                    break
                if draft[position] in matcher.end_ids:
                    break
                matcher.advance([draft[position]])
                taken += 1
        finally:
            matcher.rollback(taken)

    def _fill_row(self, matcher: Matcher, row: Rows) -> None:
        for _ in range(2):
            # By way of the state, which `recover` replaces.
            started = time.thread_time()
            guarded(lambda: matcher.state.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes))
            taken_s = time.thread_time() - started
            if taken_s > MAX_MASK_S:
                raise EngineError(
                    f"the request's grammar failed after {matcher.num_tokens} tokens: a mask takes "
                    f"{taken_s * 1e3:.0f} ms; allowed: {MAX_MASK_S * 1e3:.0f} ms"
                )
            if not matcher.state.is_error():
                return
            matcher.recover()
        raise matcher.failure()

    def _replace_ends(self, row: Rows, end_ids: frozenset[int]) -> None:
        """The library knows the model's ends: put the request's in their place."""
        may_end = bool(row[self._stop_id // 32] >> (self._stop_id % 32) & 1)
        _set(row, [self._stop_id, *self._model_ends], False)
        _set(row, end_ids, may_end)


def _set(row: Rows, ids: Sequence[int] | frozenset[int], value: bool) -> None:
    words = row.view(np.uint32)
    for id_ in ids:
        bit = np.uint32(1 << (id_ % 32))
        if value:
            words[id_ // 32] |= bit
        else:
            words[id_ // 32] &= ~bit
