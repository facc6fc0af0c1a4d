"""Top logprobs and prompt logprobs of a step on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.core.request import Candidate
from inflight.execution.batch.device_batch import RING
from inflight_kernels.ops import batch_state, sampling


class TopLogprobs:
    """Computes the top logprobs of sampled tokens, and the logprobs of prompt tokens, for the
    requests that ask for them.

    Args:
        max_rows: rows of logits.
        workspace: the sampler's, free once it has sampled.
        device: the GPU.
    """

    def __init__(self, max_rows: int, workspace: sampling.Workspace, device: torch.device) -> None:
        self._workspace = workspace
        shape = (max_rows, sampling.MAX_TOP)
        self._ids = torch.zeros(shape, dtype=torch.int32, device=device)
        self._logprobs = torch.zeros(shape, dtype=torch.float32, device=device)
        self._own_logprobs = torch.zeros(max_rows, dtype=torch.float32, device=device)
        self._ranks = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._on_device = (self._ids, self._logprobs, self._own_logprobs, self._ranks)
        # Nothing can be copied from the meta device to the host.
        host = device if device.type == "meta" else torch.device("cpu")
        pinned = device.type == "cuda"
        self._on_host = [
            tuple(
                torch.zeros(values.shape, dtype=values.dtype, device=host, pin_memory=pinned)
                for values in self._on_device
            )
            for _ in range(RING)
        ]

    def launch(
        self,
        logits: Tensor,
        step: batch_state.Step,
        sampled: sampling.SamplingOutputs,
        ring_index: int,
    ) -> None:
        """Compute them after `sampling.sample`, and copy them to the host."""
        count = len(logits)
        sampling.top_logprobs(
            logits,
            step.num_top_logprobs[:count],
            self._workspace,
            sampled,
            sampling.TopLogprobsOutputs(
                self._ids[:count],
                self._logprobs[:count],
                self._own_logprobs[:count],
                self._ranks[:count],
            ),
            given=step.given[:count],
        )
        for source, target in zip(self._on_device, self._on_host[ring_index], strict=True):
            target[:count].copy_(source[:count], non_blocking=True)

    def of_rows(
        self, ring_index: int, first: int, token_ids: list[int], count: int
    ) -> list[list[Candidate]]:
        """Candidates of a completed step.

        Args:
            ring_index: of the step.
            first: row of the first of these tokens, which are consecutive.
            token_ids: sampled or given tokens.
            count: top logprobs to report.

        Returns:
            For each token itself, then the top ones. rank 0 marks logits that are not finite.
        """
        rows = slice(first, first + len(token_ids))
        ids, logprobs, own_logprobs, ranks = self._on_host[ring_index]
        found = zip(
            token_ids,
            own_logprobs[rows].tolist(),
            ranks[rows].tolist(),
            ids[rows, :count].tolist(),
            logprobs[rows, :count].tolist(),
            strict=True,
        )
        return [Candidate.ranked(*row) for row in found]
