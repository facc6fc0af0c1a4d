"""Sequences, beam searches and a scheduler with a few small blocks, and an engine's loop."""

from __future__ import annotations

import time
from collections.abc import Callable

from fake_runner import NUM_NAMED, PagedRunner, score
from inflight.core.batch import Batch, Chunk, Committed
from inflight.core.request import Candidate, Request
from inflight.core.sequence import Sequence
from inflight.engine.beam_search import BeamGroup
from inflight.engine.output import OutputStage
from inflight.kv.layout import KVTables
from inflight.kv.settings import KVSettings
from inflight.kv.tiers.host_cache import HostTier
from inflight.sampling.params import SamplingParams
from inflight.scheduling.kv_forecast import KVForecast
from inflight.scheduling.scheduler import Scheduler
from inflight.scheduling.step_limits import StepLimits
from inflight.scheduling.waiting_queue import WaitingQueue


def sequence(
    request_id: int, prompt_ids: list[int], max_tokens: int = 4, **fields: object
) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens)
    return Sequence(Request(request_id, prompt_ids, params, **fields), max_tokens)  # type: ignore[arg-type]


def scheduler(
    waiting: WaitingQueue | None = None,
    forecast: KVForecast | None = None,
    *,
    num_blocks: int = 16,
    block_size: int = 4,
    enable_prefix_caching: bool = True,
    tables: KVTables | None = None,
    host_tier: HostTier | None = None,
    clock: Callable[[], float] = time.monotonic,
    **limits: int,
) -> Scheduler:
    """limits: as in `StepLimits`."""
    kv = KVSettings(
        num_blocks=num_blocks,
        block_size=block_size,
        enable_prefix_caching=enable_prefix_caching,
        tables=tables,
        host_tier=host_tier,
    )
    few = {"max_num_seqs": 4, "max_num_batched_tokens": 16}
    step = StepLimits(**few | limits)
    return Scheduler(kv, step, waiting=waiting, forecast=forecast, clock=clock)


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + i * i) % 251 for i in range(length)]


class Scores(dict[Sequence, list[list[Candidate]]]):
    """What steps have found out about the prompt's tokens, by sequence."""

    def add(self, committed: list[Committed]) -> None:
        for each in committed:
            self.setdefault(each.sequence, []).extend(each.prompt_candidates)


def step(scheduler: Scheduler, fake: PagedRunner, scores: Scores | None = None) -> Batch:
    """One turn of the engine's loop, which ends sequences at max_tokens."""
    batch = scheduler.schedule()
    committed = scheduler.commit(batch, fake.launch(batch).result())
    if scores is not None:
        scores.add(committed)
    for each in committed:
        if each.sequence.num_output_tokens == each.sequence.max_tokens:
            scheduler.finish(each.sequence)
    return batch


def run_all(
    scheduler: Scheduler,
    fake: PagedRunner,
    max_steps: int = 1000,
    scores: Scores | None = None,
) -> int:
    """Steps until nothing runs or waits."""
    for num_steps in range(max_steps):
        if not scheduler.running and not scheduler.waiting:
            return num_steps
        assert step(scheduler, fake, scores).chunks, "work, but no progress"
    raise AssertionError(f"not done after {max_steps} steps")


def lengths(batch: Batch) -> dict[int, int]:
    """Lengths of the chunks, by request."""
    return {chunk.sequence.request_id: chunk.length for chunk in batch.chunks}


def rows_of(chunk: Chunk) -> int:
    """Number of rows of logits that are used."""
    return chunk.num_scores + chunk.num_drafts + chunk.samples


def scores_of(one: Sequence) -> list[list[Candidate]]:
    """The runner's logprobs of the prompt tokens after the first, if requested."""
    prompt_ids = one.request.prompt_ids
    if one.request.params.num_prompt_logprobs is None:
        return []
    return [[score(prompt_ids[:i], prompt_ids[i])] for i in range(1, len(prompt_ids))]


# ---------------------------------------------------------------- beam search

STOP = 2
"""The token that ends an output, where it may end early."""


def beam_search(
    request_id: int, prompt_ids: list[int], max_tokens: int, stops: bool = True, **params: object
) -> BeamGroup:
    given = SamplingParams(**params)  # type: ignore[arg-type]
    outputs = tuple(range(request_id, request_id + given.beam_width))
    request = Request(request_id, prompt_ids, given, output_ids=outputs)
    ends = frozenset({STOP}) if stops else frozenset()
    return search_for(Sequence(request, max_tokens, eos_token_ids=ends))


def search_for(first: Sequence) -> BeamGroup:
    return BeamGroup(first, OutputStage(None).stop_conditions_of(first), NUM_NAMED)


def best_outputs(group: BeamGroup) -> list[tuple[list[int], float]]:
    """Tokens and log-probability of each result."""
    results = [result.sequence for result in group.results()]
    return [(one.token_ids, one.cumulative_logprob) for one in results]


def searched_alone(group: BeamGroup) -> list[tuple[list[int], float]]:
    """What a search of the same request finds with the whole engine to itself."""
    beam = group.members[0]
    alone = search_for(Sequence(beam.request, beam.max_tokens, eos_token_ids=beam.eos_token_ids))
    plan, fake = scheduler(num_blocks=99), PagedRunner(num_blocks=99)
    plan.add(alone)
    while not alone.is_finished:
        batch = plan.schedule()
        if committed := plan.commit(batch, fake.launch(batch).result()):
            alone.advance(committed, plan)
    return best_outputs(alone)


def search_step(plan: Scheduler, fake: PagedRunner, group: BeamGroup) -> Batch:
    """One turn of the engine's loop with one search, which it ends."""
    batch = plan.schedule()
    if committed := plan.commit(batch, fake.launch(batch).result()):
        group.advance(committed, plan)
    if group.is_finished:
        plan.finish(group)
    return batch
