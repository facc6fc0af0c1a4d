"""Masks of the tokens allowed next in a batch, as bits: one row per sequence and position."""

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
"""Consecutive white space in JSON, where the grammar allows any amount and some models never stop.
Bounding it in the grammar would cost three times as much: each count is a separate state."""

MAX_MASK_S = 0.02
"""CPU time of one mask. A grammar that takes more, despite the sandbox and the library's limits,
fails: the rest of the batch would wait for it at every step."""


class MaskFiller:
    """Fills masks one after the other, on the calling thread.

    A mask takes some 10 us, and copies of a grammar contend for one lexer: threads do not pay off,
    even for 256 sequences. The library releases the GIL for each mask, so that other threads
    proceed meanwhile.

    Args:
        vocabulary: of the model.

    Attributes:
        num_words: int32 of a row.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._is_slow = False  # a mask was slow: the next batch finds out which one
        self.num_words = vocabulary.num_words
        self._stop_id = vocabulary.stop_id
        self._model_ends = vocabulary.end_ids
        bits = np.ones(self.num_words * 32, np.uint8)
        bits[list(vocabulary.whitespace)] = 0
        self._non_whitespace = np.packbits(bits, bitorder="little").view(np.int32)
        # The model's padding ids beyond the tokenizer's: a grammar can name them by number.
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
        """Fill the masks of the tokens allowed next.

        Args:
            matchers: each at most once.
            out: [rows, ceil(vocab_size / 32)] int32, C-contiguous; bit i % 32 of word i // 32 says
                whether token i is allowed. Without drafts, row r is that of matcher r.
            drafts: draft tokens for each matcher. It then has 1 + len(draft) consecutive rows,
                after those of the previous matchers: the first as without drafts, each further one
                after one more accepted draft. Rows after a draft that does not match, or that ends
                the output, allow all tokens: what is sampled there is dropped.

        Returns:
            Index and error of each matcher that failed. Its rows allow all tokens, so that the
            sampler can proceed.

        Raises:
            ValueError: `out` has another type, layout or shape.
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
            if matcher.is_json:
                draft = drafts[index] if drafts is not None else ()
                self._ban_whitespace(rows[starts[index] :], matcher.whitespace_bytes(draft))
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

    def _ban_whitespace(self, rows: Rows, lengths: Sequence[int]) -> None:
        """Allow no further whitespace after so many bytes of it, where anything else is allowed.

        Args:
            rows: at least as many as lengths.
            lengths: of the whitespace before each row.
        """
        for row, length in zip(rows, lengths, strict=False):
            if length >= MAX_WHITESPACE_BYTES:
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
        """Fill without checks; returns the indices to redo one by one."""
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
            except BaseException:  # a Rust panic; redone one by one
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
            # Via `matcher.state`, which `recover` replaces.
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
        """Replace the model's end tokens, which the library knows, by the request's."""
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
