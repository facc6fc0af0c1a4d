"""A step in flight on a GPU's stream, and how its results are read."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from inflight.core.batch import NO_ALLOWED_TOKENS, NOT_FINITE, Batch, StepOutput
from inflight.core.request import Candidate
from inflight.execution.batch.device_batch import DeviceBatch, SampledTokens, SubmittedStep
from inflight.execution.batch.grammar_masks import GrammarMasks
from inflight.execution.batch.top_logprobs import TopLogprobs
from inflight_kernels.ops import sampling
from inflight_kernels.ops.batch_state import NOT_DRAFTED

# The sampler's statuses as errors of a request.
_FAULTS = {sampling.NOT_FINITE: NOT_FINITE, sampling.NO_ALLOWED_TOKENS: NO_ALLOWED_TOKENS}


@dataclass(frozen=True, slots=True)
class HostDrafts:
    """Drafts that the host has found for a step.

    Attributes:
        token_ids: of each chunk, as `DeviceBatch.send` takes them.
        num_found: chunk index -> how many of them were found.
        from_outputs: see `StepOutput`.
    """

    token_ids: list[list[int]]
    num_found: dict[int, int] = field(default_factory=dict)
    from_outputs: set[int] = field(default_factory=set)


class PendingCudaStep:
    """A step in flight on the stream (see `runner.PendingStep`)."""

    def __init__(
        self,
        device: DeviceBatch,
        top_logprobs: TopLogprobs,
        masks: GrammarMasks,
        batch: Batch,
        sent: SubmittedStep,
        drafts: HostDrafts,
        ended: torch.cuda.Event,
    ) -> None:
        self._device = device
        self._top_logprobs = top_logprobs
        self._masks = masks
        self._batch = batch
        self._sent = sent
        self._drafts = drafts
        self._ended = ended

    def result(self) -> StepOutput:
        self._ended.synchronize()
        output = StepOutput([], [])
        self._masks.report(output)
        results = self._device.results(self._batch, self._sent)
        for index, (chunk, chosen) in enumerate(zip(self._batch.chunks, results, strict=True)):
            if chunk.num_drafts or chosen.num_proposed != NOT_DRAFTED:
                self._count_drafts(index, chosen, output)
            fine = chunk.samples and chosen.status == sampling.OK
            output.token_ids.append(chosen.token_ids if fine else [])
            output.logprobs.append(chosen.logprobs if fine else [])
            if chunk.samples and not fine:
                output.errors.setdefault(index, _FAULTS[chosen.status])
            params, first = chunk.sequence.request.params, self._sent.row_start[index]
            if chunk.num_scores:
                found = self._candidates_of(
                    first, chunk.scored_ids, params.num_prompt_logprobs or 0
                )
                if all(own[0].rank for own in found):
                    output.prompt_candidates[index] = found
                else:
                    output.errors.setdefault(index, NOT_FINITE)
            count = chunk.sequence.num_candidates
            if fine and count is not None:
                first += chunk.num_scores
                output.candidates[index] = self._candidates_of(first, chosen.token_ids, count)
        return output

    def _count_drafts(self, index: int, chosen: SampledTokens, output: StepOutput) -> None:
        num_drafts = self._batch.chunks[index].num_drafts
        num_proposed = self._drafts.num_found.get(index, chosen.num_proposed)
        if num_proposed != NOT_DRAFTED:
            output.num_proposed[index] = num_proposed
            if chosen.would_accept:
                output.would_accept.add(index)
        # Token 0, which stands for a missing draft, may be accepted like one.
        verified = max(min(num_drafts, num_proposed), len(chosen.token_ids) - 1)
        if verified > 0:
            output.num_drafted[index] = verified
            if index in self._drafts.from_outputs:
                output.from_outputs.add(index)

    def _candidates_of(self, first: int, token_ids: list[int], count: int) -> list[list[Candidate]]:
        return self._top_logprobs.of_rows(self._sent.ring_index, first, token_ids, count)
