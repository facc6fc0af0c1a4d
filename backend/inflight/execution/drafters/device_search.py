"""Drafting from a sequence's own tokens on a GPU."""

from __future__ import annotations

from inflight.execution.batch.device_batch import DeviceBatch
from inflight.execution.drafters.drafter import DeviceDrafter
from inflight_kernels.ops import drafting


class DeviceSearch(DeviceDrafter):
    """Compares a sequence's last tokens with those before each of its tokens, and drafts what
    followed the longest match (see `torch_ops.drafting.find_match`). One block of threads for each
    sequence.

    Args:
        max_match: tokens after which a longer match no longer counts.
        min_match: shortest match.
        per_match: drafts at most for each token that matches; 0 for no such limit.
        resumes: a single token resumes a passage that the text copied and left.
    """

    is_search = True

    def __init__(
        self, max_match: int, min_match: int, *, per_match: int = 0, resumes: bool = False
    ) -> None:
        super().__init__()
        self._limits = drafting.MatchLimits(max_match, min_match, per_match)
        self._resumes = resumes

    def draft(self, batch: DeviceBatch, num_chunks: int, num_drafts: int) -> None:
        state = batch.state
        assert state.history is not None
        drafting.draft_ngram(
            batch.step.sample_slots[:num_chunks],
            state.last_positions,
            state.history,
            state.drafts,
            self._limits,
            copies=state.copies if self._resumes else None,
            pdl=True,
        )
