"""The size of a step, which decides which kernels compute it."""

from __future__ import annotations

from dataclasses import dataclass

from inflight.core.batch import Batch

# Steps of fewer sequences are bound by latencies, not by keys and values.
_MIN_SHARING = 8

# Keys are counted in whole blocks of the largest size that kernels use.
_KEYS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class StepSize:
    """The size of a step, or the capacity of a captured one.

    Attributes:
        num_tokens: T.
        num_chunks: n.
        num_rows: rows of logits, at least one per chunk. If equal to num_tokens, row i is token
            i's.
        max_q_len: tokens of the longest chunk.
        prompt_keys: at least the keys of all chunks with more than one token, in whole blocks of
            64 for each; None if unknown: a captured step then takes any number of them.
        shares_prefixes: whether keys and values of common prefixes are read once for all
            sequences, in a step of one token each. Results are the same, but for rounding.
    """

    num_tokens: int
    num_chunks: int
    num_rows: int
    max_q_len: int
    prompt_keys: int | None = None
    shares_prefixes: bool = False

    @classmethod
    def of(cls, batch: Batch) -> StepSize:
        num_tokens = num_rows = max_q_len = prompt_keys = 0
        for chunk in batch.chunks:
            length, num_scores = chunk.length, chunk.num_scores
            num_tokens += length
            max_q_len = max(max_q_len, length)
            num_rows += num_scores
            if chunk.samples or not num_scores:
                num_rows += 1 + chunk.num_drafts
            if length > 1:
                prompt_keys += -(-chunk.end // _KEYS_AT_ONCE) * _KEYS_AT_ONCE
        num_chunks = len(batch.chunks)
        shares = batch.shares_prefixes and max_q_len == 1 and num_chunks >= _MIN_SHARING
        return cls(num_tokens, num_chunks, num_rows, max_q_len, prompt_keys, shares)

    @classmethod
    def decode(cls, num_chunks: int) -> StepSize:
        """Of one token, and one row, for each of so many chunks."""
        return cls(num_chunks, num_chunks, num_chunks, 1, 0)

    def fits(self, step: StepSize) -> bool:
        """Whether a step fits when padded with tokens, rows and chunks."""
        return (
            (step.num_rows == step.num_tokens or self.num_rows < self.num_tokens)
            and step.num_tokens <= self.num_tokens
            and step.num_chunks <= self.num_chunks
            and step.num_rows <= self.num_rows
            and step.max_q_len <= self.max_q_len
            and step.shares_prefixes >= self.shares_prefixes
            and self._has_keys_for(step)
        )

    def _has_keys_for(self, step: StepSize) -> bool:
        if self.prompt_keys is None:
            return True
        return step.prompt_keys is not None and step.prompt_keys <= self.prompt_keys
