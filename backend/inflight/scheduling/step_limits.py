"""What a step may compute at most."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Limits of a step.

    Attributes:
        max_num_seqs: running sequences. Each may need a token in the same step, so that
            max_num_batched_tokens limits them, too.
        max_num_batched_tokens: tokens.
        max_prefill_chunk: tokens of one prompt; None for all of the step's.
        max_draft_tokens: draft tokens, which are assigned in order of admission.
        max_rows: rows of logits; None for no limit. A prompt with requested logprobs takes one for
            each token, but never another sequence's: the remaining rows are assigned in order of
            admission, at least one each.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_chunk: int | None = None
    max_draft_tokens: int = 256
    max_rows: int | None = None

    @property
    def max_running(self) -> int:
        """Running sequences."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def max_chunk(self) -> int:
        """Tokens of one prompt."""
        return self.max_prefill_chunk or self.max_num_batched_tokens
