"""Plans steps: which tokens are computed next, and in which KV blocks.

Continuous batching at token granularity (Orca, OSDI 2022) over a paged KV cache (vLLM, SOSP 2023),
with chunked prefill mixed into decode steps (Sarathi-Serve, OSDI 2024). The scheduler counts tokens
and never reads their values; it knows neither devices nor text.

    add -> WAITING --schedule--> RUNNING --finish--> FINISHED
              ^  ^--preemption-----'  |
              '---resume--- SUSPENDED <--suspend

Steps may be scheduled ahead, while the tokens of the previous ones are not known yet. As steps run
in scheduling order, a chunk counts as computed, and a released block as free, from the moment of
scheduling: the block's next owner writes to it in a later step. Results arrive with `commit`. Those
of a sequence that has lost its blocks meanwhile, detected by its generation, are dropped and
computed again. Only committed blocks are registered in the prefix cache, so no step in flight
writes to a registered block.

It is free of deadlocks: every group fits into the whole pool (`engine.admission`). Groups run in
order of admission; when the pool is exhausted, the most recently admitted one is preempted,
possibly the requester. So the first running group always advances, or a commit is due that allows
it to; once it has finished, the next one is first.

Nor does a group starve. The queue (`scheduling.waiting_queue`) names one group to admit next; while
it lacks blocks, no smaller one is admitted, and those that run end. It also waits for blocks that
are kept free for the growth of those that run (`scheduling.kv_forecast`): when nothing runs, none
are. A preempted group returns to
the front of its tenant's queue, so only other tenants can be admitted before it. Each of them is
charged for that, and its own tenant only for what it still runs: after a bounded number of tokens
it is next.

The unit of queueing, running and preemption is a `SequenceGroup`: a single sequence, or the beams
of a search. Beams select their next tokens in one step: preempted ones are first recomputed up to
their last token, their common prefix once. Beams that diverge share their blocks, full or not; the
first one to write to a shared block writes to a copy (copy-on-write).
"""

from __future__ import annotations

import itertools
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from inflight.core.batch import Batch, Chunk, Committed, StepOutput
from inflight.core.request import Candidate
from inflight.core.sequence import Sequence, SequenceGroup, Status
from inflight.errors import EngineError
from inflight.kv.block_pool import BlockPool
from inflight.kv.block_tables import BlockTables, Copy
from inflight.kv.settings import KVSettings
from inflight.kv.tiers.host_cache import HostCache
from inflight.scheduling.kv_forecast import KVForecast
from inflight.scheduling.prefill_budget import PrefillBudget
from inflight.scheduling.step_limits import StepLimits
from inflight.scheduling.token_charges import TokenCharges
from inflight.scheduling.waiting_queue import WaitingQueue


class Scheduler:
    """Plans steps and owns the KV blocks. One thread calls it.

    Batches from `schedule` must be computed and committed in order, or their sequences must be
    finished: the copies of a batch are requested only once. How many are scheduled ahead of the
    first commit is the caller's choice.

    Args:
        kv: the KV blocks, and how they are used.
        limits: of a step.
        waiting: the queue, empty; None for one with default limits.
        prefill_budget: limits prompts in steps that also decode; None for no limit.
        forecast: says how many blocks admissions leave free for the growth of those that run; None
            for one for each sequence that grows.
        clock: seconds, monotonic; read once per step and request, for the times of the prefix cache
            and for how long prompts have waited.

    Attributes:
        max_num_seqs: maximum running sequences.
        num_preemptions: how often a running sequence was preempted.
        num_prompt_tokens: tokens in the prompts admitted so far.
        num_cached_tokens: those of them that came from the prefix cache.
        host_cache: the blocks in host memory; None without.
        lacks_blocks: whether the last step could not admit the head of the queue, for it needs more
            KV blocks than are free and not kept for those that run.
    """

    def __init__(
        self,
        kv: KVSettings,
        limits: StepLimits,
        *,
        waiting: WaitingQueue | None = None,
        prefill_budget: PrefillBudget | None = None,
        forecast: KVForecast | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.lacks_blocks = False
        self._clock = clock
        self._pool = pool = BlockPool(kv.num_blocks, kv.block_size)
        self.host_cache = None if kv.host_tier is None else HostCache(kv.host_tier, pool)
        self._tables = BlockTables(pool, kv.enable_prefix_caching, kv.tables, self.host_cache)
        self.max_num_seqs = limits.max_running
        self._max_num_batched_tokens = limits.max_num_batched_tokens
        self._max_chunk = limits.max_chunk
        self._max_draft_tokens = limits.max_draft_tokens
        self._max_rows = sys.maxsize if limits.max_rows is None else limits.max_rows
        self._prefill_budget = prefill_budget
        self._forecast = forecast
        self._waiting = WaitingQueue() if waiting is None else waiting
        self._running: OrderedDict[int, SequenceGroup] = OrderedDict()  # in order of admission
        self._suspended: dict[int, SequenceGroup] = {}
        self._num_batch_slots = 0  # of the running sequences
        self._fork_ids = itertools.count(-2, -1)  # negative: no request has such an id
        self._charges = TokenCharges(self._waiting, self._running)

    @property
    def waiting(self) -> WaitingQueue:
        """The queue, to look at."""
        return self._waiting

    @property
    def running(self) -> Collection[SequenceGroup]:
        """Live view, first admitted first."""
        return self._running.values()

    @property
    def suspended(self) -> Collection[SequenceGroup]:
        """Live view, first suspended first."""
        return self._suspended.values()

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence owns; some of them may hold cached prefixes."""
        return self._pool.num_free

    def add(self, group: SequenceGroup, retry_after_s: int = 1) -> None:
        """Queue a new request, which must fit into the whole pool.

        Args:
            group: the request's.
            retry_after_s: what a refusal tells the client.

        Raises:
            CapacityError: too many requests or tokens are waiting (see `WaitingQueue.check`).
        """
        self._waiting.check(group, retry_after_s)
        group.status = Status.WAITING
        group.queued_at = self._clock()
        self._charges.charge_before(group)
        self._waiting.push(group)

    def schedule(self) -> Batch:
        """Plan one step: running sequences first, then new ones while there is capacity.

        Each running sequence in decode gets one token and, as far as its limits and the pool allow,
        its drafts. Prompts share the rest of the budget: in order of admission each takes half of
        what is left, so that a long prompt delays later ones but does not starve them; the
        remainder goes to the last.
        """
        self._pool.now = self._clock()
        chunks: list[Chunk] = []
        copies: list[Copy] = []
        preempted = self.num_preemptions
        prefills, num_drafted = self._decode(chunks, copies)
        budget = self._budget_for_prompts(len(chunks) + num_drafted, prefills)
        lengths: list[int] = []
        for sequence in prefills:
            lengths.append(self._prefill_share(sequence, budget))
            budget -= lengths[-1]
        cached: list[Copy] = []  # copies for those that are admitted
        is_first = not chunks and not prefills  # what is admitted now is all that this step does
        has_loads = self._tables.num_planned_loads > 0  # of a step without chunks
        # The blocks that a sequence lost in this step are for the one that took them.
        self.lacks_blocks = self.num_preemptions > preempted
        if not self.lacks_blocks:
            budget = self._admit_waiting(prefills, lengths, budget, cached, is_first)
        # Released last, so that no block is both source and target of this step's copies.
        self._pool.release([source for source, _ in cached])
        # One row of logits for each of these; the rest is for prompt logprobs.
        rows = max(0, self._max_rows - len(chunks) - num_drafted - len(prefills))
        self._distribute_rest(prefills, lengths, budget, rows)
        for sequence, length in zip(prefills, lengths, strict=True):
            if length:
                chunks.append(self._prefill(sequence, length))
        copies += cached
        shares = self._tables.shares_prefixes
        if not chunks or self.host_cache is None:
            return Batch(chunks, copies, shares_prefixes=shares)
        loads, stores = self._tables.take_loads(), self._tables.plan_stores()
        reads_loads = has_loads or (is_first and self._tables.is_loading(prefills[0]))
        return Batch(chunks, copies, loads, stores, bool(loads) and reads_loads, shares)

    def _decode(self, chunks: list[Chunk], copies: list[Copy]) -> tuple[list[Sequence], int]:
        """Plan the running sequences that decode.

        Returns:
            The sequences that still have prompt to compute, and the number of drafts planned.
        """
        prefills: list[Sequence] = []
        # Every running sequence's own token takes precedence.
        drafts_left = min(
            self._max_draft_tokens, self._max_num_batched_tokens - self._num_batch_slots
        )
        num_drafted = 0
        running = Status.RUNNING
        for group in list(self._running.values()):
            if group.status is not running:
                continue  # preempted earlier in this loop
            if not isinstance(group, Sequence):
                prefills += self._plan_beams(group, chunks, copies)
                continue
            sequence = group  # most groups; the rest is the host's time of a decode step
            start, num_in_flight = sequence.num_computed, sequence.num_in_flight
            num_tokens = len(sequence.token_ids) + num_in_flight
            if num_tokens - start > 1:
                prefills.append(sequence)  # has all blocks that its known tokens need
            elif num_in_flight and (
                sequence.needs_committed_tokens or num_tokens >= sequence.max_length
            ):
                continue  # must be committed first
            elif start < sequence.capacity or self._grow(sequence):
                drafts = 0
                if sequence.num_drafts:
                    drafts = self._num_drafts_that_fit(sequence, drafts_left - num_drafted)
                    num_drafted += drafts
                length = 1 + drafts
                chunks.append(Chunk(sequence, start, length, True, sequence.generation, drafts))
                sequence.num_computed = start + length
                sequence.num_in_flight = num_in_flight + length
        return prefills, num_drafted

    def _budget_for_prompts(self, num_decodes: int, prompts: list[Sequence]) -> int:
        """Prompt tokens of a step that has so many tokens of decodes."""
        budget = self._max_num_batched_tokens - num_decodes
        if self._prefill_budget is None or not num_decodes or not (prompts or self._waiting):
            return budget
        found = self._prefill_budget.tokens(
            num_decodes,
            prompts,
            num_waiting=len(self._waiting),
            num_waiting_tokens=sum(self._waiting.num_tokens.values()),
            now=self._pool.now,
        )
        return min(budget, found)

    def _admit_waiting(
        self,
        prefills: list[Sequence],
        lengths: list[int],
        budget: int,
        copies: list[Copy],
        is_first: bool,
    ) -> int:
        """Admit from the head of the queue while there is capacity; returns the remaining budget.

        An admitted request's first chunk is appended to `prefills`, with its budget. One that loads
        blocks from host memory has its first chunk in the next step, so that the copies overlap
        with this one, unless it is the first of an empty step.
        """
        max_loads = self._max_num_batched_tokens // self._pool.block_size
        while self._waiting and budget and self._num_batch_slots < self.max_num_seqs:
            if self._waiting.has_choice:
                self._charges.charge_output()
            group = self._waiting.head
            if self._num_batch_slots + group.width > self.max_num_seqs:
                break
            plan = _PrefillPlan(prefills, lengths, budget, self._max_chunk)
            if self._tables.awaits_prefix(group, plan.end_of) or self._tables.awaits_disk(group):
                break
            kept_free = 0
            if self._forecast is not None and self._running:
                kept_free = self._forecast.blocks_for(group, self._pool.num_free)
            needed = self._tables.admit(group, kept_free)
            if needed is None:
                self.lacks_blocks = True
                break
            copies += needed
            first = group.members[0]
            self._run(group, first.num_computed)
            if self._tables.is_loading(first) and (prefills or not is_first):
                if self._tables.num_planned_loads > max_loads:
                    break
                continue
            prefills.append(first)
            lengths.append(self._prefill_share(first, budget))
            budget -= lengths[-1]
        return budget

    def _distribute_rest(
        self, prefills: list[Sequence], lengths: list[int], budget: int, rows: int
    ) -> None:
        """Distribute the remaining budget from the last prompt on, after taking back what prompts
        with requested logprobs have no rows of logits for."""
        limits = [self._max_chunk] * len(prefills)
        for index, sequence in enumerate(prefills):
            before = _num_before_scores(sequence)
            if before is not None:
                limits[index] = min(self._max_chunk, before + 1 + rows)
                rows -= max(0, min(_num_to_prefill(sequence), limits[index]) - before - 1)
                excess = max(0, lengths[index] - limits[index])
                lengths[index] -= excess
                budget += excess
        for index in reversed(range(len(prefills))):
            wanted = min(_num_to_prefill(prefills[index]), limits[index]) - lengths[index]
            lengths[index] += min(wanted, budget)
            budget -= min(wanted, budget)

    def commit(self, batch: Batch, output: StepOutput) -> list[Committed]:
        """Apply the results of a step.

        A sequence that has lost its blocks since `schedule` (finished, suspended, preempted) is
        skipped, even if it runs again. So is one in `output.errors`: the caller finishes it before
        the next `schedule`. A beam gets candidates instead of tokens; `branch` selects its
        continuations.

        Returns:
            The results of each sequence with tokens, candidates or prompt_candidates, in batch
            order.

        Raises:
            EngineError: the runner returned no token for a sequence, or more than requested.
        """
        self._charges.is_complete = False
        committed: list[Committed] = []
        size, loading = self._pool.block_size, self._tables.num_loading
        errors, candidates = output.errors, output.candidates
        none: list[list[Candidate]] = []
        for index, chunk in enumerate(batch.chunks):
            sequence = chunk.sequence
            if chunk.generation != sequence.generation or index in errors:
                continue
            length, scores = chunk.length, none
            if chunk.num_scores:
                sequence.num_scored += chunk.num_scores
                scores = output.prompt_candidates.get(index, none)
            if chunk.samples:
                token_ids, logprobs = output.token_ids[index], output.logprobs[index]
                known = sequence.token_ids
                end = len(known)
                if sequence.beam_of is not None:
                    token_ids, logprobs = [], []
                elif chunk.num_drafts or len(token_ids) != 1:
                    num_rejected = self._settle_drafts(sequence, chunk, len(token_ids))
                    # The KV of the known tokens and the accepted drafts is in the pool.
                    end += len(token_ids) - 1
                    length -= num_rejected
                    sequence.num_drafted += output.num_drafted.get(index, 0)
                    sequence.cumulative_logprob += sum(logprobs)
                else:
                    sequence.cumulative_logprob += logprobs[0]
                known += token_ids
                sequence.num_in_flight -= 1
                sequence.num_steps += 1
                named = candidates.get(index, none) if candidates else none
                committed.append(Committed(sequence, token_ids, logprobs, named, scores))
            else:
                end = chunk.end
                if scores:
                    committed.append(Committed(sequence, [], [], none, scores))
            # Most steps of most sequences fill no block.
            if end % size < length or (loading and self._tables.is_loading(sequence)):
                self._tables.commit(sequence, end - length, end)
        return committed

    def stored(self, tickets: Iterable[int]) -> None:
        """The runner has copied the blocks of these tickets to host memory."""
        self._tables.stored(tickets)

    def plan_stores(self) -> Batch:
        """A batch without chunks, which copies blocks to host memory while nothing runs."""
        return Batch([], stores=self._tables.plan_stores())

    def abandon(self, batch: Batch) -> None:
        """The step of a batch failed. What it was to copy from and to host memory is forgotten;
        running sequences that may depend on it are preempted."""
        for sequence in self._tables.abandon(batch):
            if sequence.group.status is Status.RUNNING:
                self._preempt(sequence.group)

    def branch(
        self, former: Iterable[Sequence], continuations: Iterable[tuple[Sequence, int, float]]
    ) -> list[Sequence]:
        """Replace the beams of a search, all of them committed, by their continuations.

        Args:
            former: its beams.
            continuations: (beam, next token, its logprob) each. A beam may be continued several
                times; the others end.

        Returns:
            The new beams, in the order of the continuations.
        """
        taken: set[Sequence] = set()
        continuations = list(continuations)
        beams = []
        for beam, _, _ in continuations:
            if beam in taken:  # a further continuation: fork before its token is appended
                beam = beam.fork(next(self._fork_ids))
                self._tables.share(beam)
            taken.add(beam)
            beams.append(beam)
        for beam, (_, token_id, logprob) in zip(beams, continuations, strict=True):
            beam.token_ids.append(token_id)
            beam.cumulative_logprob += logprob
        for beam in former:
            if beam not in taken:
                self._tables.release(beam)
        return beams

    def finish(self, group: SequenceGroup) -> None:
        """End a group of any status and free its blocks. A second time does nothing."""
        if group.status is not Status.FINISHED:
            if self._forecast is not None and group.status is Status.RUNNING:
                self._forecast.ended(group)
            self._remove(group)
            self._charges.forget(group)
            group.status = Status.FINISHED

    def suspend(self, group: SequenceGroup) -> None:
        """Take a group out of the queue or the batch; its full blocks stay in the cache.

        Does nothing to one that is finished or suspended.
        """
        if group.status in (Status.RUNNING, Status.WAITING):
            self._remove(group)
            group.status = Status.SUSPENDED
            self._suspended[group.request_id] = group

    def resume(self, group: SequenceGroup) -> None:
        """Put a suspended group at the head of the queue; does nothing to any other."""
        if group.status is Status.SUSPENDED:
            self._remove(group)
            self._requeue(group)

    def _prefill_share(self, sequence: Sequence, budget: int) -> int:
        """Tokens of a prompt in the first round: half the budget, at least a block."""
        half = max((budget + 1) // 2, self._pool.block_size)
        return min(half, budget, self._max_chunk, _num_to_prefill(sequence))

    def _prefill(self, sequence: Sequence, length: int) -> Chunk:
        start, end = sequence.num_computed, sequence.num_computed + length
        samples = end == sequence.num_tokens
        before = _num_before_scores(sequence)
        num_scores = 0 if before is None else max(0, length - before - samples)
        sequence.num_computed = end
        sequence.num_in_flight += samples
        return Chunk(sequence, start, length, samples, sequence.generation, 0, num_scores)

    def _plan_beams(
        self, group: SequenceGroup, chunks: list[Chunk], copies: list[Copy]
    ) -> list[Sequence]:
        """Plan a search's step: the next token of all its beams, if all are ready.

        Returns:
            The beams that still have tokens to compute first.
        """
        beams = group.members
        late = [beam for beam in beams if beam.num_uncomputed > 1]
        if late:
            # A beam's shared blocks must be computed in an earlier step than its own.
            done = itertools.accumulate((beam.num_computed for beam in beams), min)
            return [
                beam
                for beam, least in zip(beams, done, strict=True)
                if beam.num_uncomputed > 1 and beam.num_computed <= least
            ]
        if not beams[0].num_in_flight and self._grow_beams(group, copies):
            for beam in beams:
                start = beam.num_computed
                chunks.append(Chunk(beam, start, 1, True, beam.generation))
                beam.num_computed = start + 1
                beam.num_in_flight = 1
        return []

    def _grow_beams(self, group: SequenceGroup, copies: list[Copy]) -> bool:
        """Give each beam its own block for its next token; False if the group was preempted.

        All of them or none: no copy of this step is for a group that loses its blocks in it.
        """
        places = self._tables.beams_needing_blocks(group.members)
        if not self._free_blocks(len(places), group):
            return False
        copies += self._tables.copy_on_write(places)
        return True

    def _settle_drafts(self, sequence: Sequence, chunk: Chunk, num_chosen: int) -> int:
        """Undo the counts of rejected drafts, which were counted as accepted; returns their number.

        Raises:
            EngineError: the runner returned no token, or more than requested.
        """
        if not 1 <= num_chosen <= 1 + chunk.num_drafts:
            raise EngineError(
                f"the runner returned {num_chosen} tokens for request {sequence.request_id}; "
                f"allowed: 1 to {1 + chunk.num_drafts}"
            )
        num_accepted = num_chosen - 1
        num_rejected = chunk.num_drafts - num_accepted
        sequence.num_computed -= num_rejected
        sequence.num_in_flight -= chunk.num_drafts
        sequence.num_accepted += num_accepted
        return num_rejected

    def _grow(self, sequence: Sequence) -> bool:
        """Append blocks to a decoding sequence whose last ones are full; False if preempted."""
        if not self._free_blocks(self._tables.num_to_append(sequence), sequence):
            return False
        self._tables.append(sequence)
        return True

    def _free_blocks(self, count: int, group: SequenceGroup) -> bool:
        """Preempt the most recently admitted group until so many blocks are free; False if `group`
        itself was preempted."""
        while self._pool.num_free < count:
            victim = next(reversed(self._running.values()))
            self._preempt(victim)
            if victim is group:
                return False
        return True

    def _num_drafts_that_fit(self, sequence: Sequence, budget: int) -> int:
        """How many drafts fit into a step of a decoding sequence, after its token."""
        # Before min_tokens the host bans EOS tokens, so it must know a step's exact position.
        if sequence.num_tokens - sequence.num_prompt_tokens < sequence.request.params.min_tokens:
            return 0
        # With all drafts accepted, and the token after them, it reaches max_length.
        room = sequence.max_length - sequence.num_tokens - 1
        return self._tables.reserve_for_drafts(
            sequence, max(0, min(sequence.num_drafts, budget, room))
        )

    def _preempt(self, group: SequenceGroup) -> None:
        self._remove(group)
        self._requeue(group)
        group.num_preemptions += 1
        self.num_preemptions += 1

    def _run(self, group: SequenceGroup, num_cached: int) -> None:
        self._waiting.remove(group)
        self._running[group.request_id] = group
        group.status = Status.RUNNING
        self._num_batch_slots += group.width
        if self._forecast is not None:
            self._forecast.add(group, self._tables.num_shared(group))
        if group not in self._charges:
            group.num_cached_tokens = num_cached
            self.num_cached_tokens += num_cached
            self.num_prompt_tokens += group.num_prompt_tokens
            self._charges.begin(group)

    def _remove(self, group: SequenceGroup) -> None:
        """Remove a group from queue or batch and release its blocks, the only way to do so.

        It keeps its tokens: if it runs again, they are computed like a prompt.
        """
        if self._running.pop(group.request_id, None) is not None:
            self._tables.free(group)
            self._num_batch_slots -= group.width
            if self._forecast is not None:
                self._forecast.remove(group)
            self._charges.charge_rest(group)
        self._waiting.remove(group)
        self._suspended.pop(group.request_id, None)

    def _requeue(self, group: SequenceGroup) -> None:
        group.status = Status.WAITING
        group.queued_at = self._clock()
        self._charges.charge_before(group)
        self._waiting.push_front(group)


class _PrefillPlan(NamedTuple):
    """Prompts of a step that is being planned, with their tokens; the last one may take the rest,
    up to `max_chunk`."""

    prompts: list[Sequence]
    lengths: list[int]
    rest: int
    max_chunk: int

    def end_of(self, sequence: Sequence) -> int:
        """Tokens of a sequence that are computed with this step and those before."""
        if sequence not in self.prompts:
            return sequence.num_computed
        length = self.lengths[self.prompts.index(sequence)]
        if sequence is self.prompts[-1]:
            length = min(length + self.rest, self.max_chunk)
        return sequence.num_computed + length


def _num_before_scores(sequence: Sequence) -> int | None:
    """Tokens to compute before the first one that needs a row of logits for prompt logprobs: those
    scored before a preemption.

    Returns:
        None if nothing is left to score.
    """
    if sequence.num_scored >= sequence.num_prompt_tokens:
        return None
    return max(0, sequence.num_scored - 1 - sequence.num_computed)


def _num_to_prefill(sequence: Sequence) -> int:
    """Tokens to prefill; one of several beams leaves its last token to the search's step."""
    num_tokens = sequence.num_uncomputed
    if sequence.beam_of is not None and len(sequence.beam_of.members) > 1:
        num_tokens -= 1
    return num_tokens
