"""For any pool, budget and load, each request gets the same tokens as alone."""

from __future__ import annotations

import zlib
from collections import deque
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from fake_runner import LateStep, PagedRunner, alone, next_token
from inflight.core.batch import Batch, Chunk
from inflight.core.request import PriorityClass, Request
from inflight.core.sequence import Sequence, SequenceGroup, Status
from inflight.engine.admission import PoolLimits
from inflight.engine.beam_search import BeamGroup
from inflight.errors import RequestError
from inflight.kv.layout import KVTable, KVTables
from inflight.kv.tiers.host_cache import HostTier
from inflight.sampling.params import SamplingParams
from inflight.scheduling.kv_forecast import KVForecast
from inflight.scheduling.output_lengths import MIN_SAMPLES, OutputLengths
from inflight.scheduling.waiting_queue import QueueKey
from scheduling import (
    STOP,
    Scores,
    beam_search,
    best_outputs,
    rows_of,
    scheduler,
    scores_of,
    searched_alone,
)


def guess(token_ids: list[int], count: int) -> list[int]:
    """A drafter that is mostly right, and sometimes has fewer than it was asked for."""
    drafts: list[int] = []
    for _ in range(count):
        luck = zlib.crc32(bytes([*token_ids, *drafts, 7])) % 8
        if luck == 0:
            break
        right = next_token([*token_ids, *drafts], 3)
        drafts.append(right if luck > 2 else (right + 1) % 3)
    return drafts


# Of two tables, one has blocks as those of the kernels.
COUNTS = st.sampled_from([(1, 1), (2, 1), (3, 1), (1, 2)])
TILES = st.sampled_from([1, 2, 4])
TABLES = st.one_of(
    st.just((KVTable(),)),
    st.builds(
        lambda window, tile_tokens: (KVTable((), window, 1, tile_tokens),),
        st.integers(1, 7),
        TILES,
    ),
    st.builds(
        lambda counts, window, tile_tokens: (
            KVTable((), 0, counts[0]),
            KVTable((), window, counts[1], tile_tokens),
        ),
        COUNTS,
        st.integers(1, 7),
        TILES,
    ),
)


def owned_by(one: Sequence) -> list[int]:
    """Its blocks in all tables."""
    places = zip(one.first_blocks, one.tables, strict=True)
    return [block for first, table in places for block in table[first:]]


HOST_SLOTS = st.sampled_from([0, 1, 4, 20])

# The cache_priority and cache_ttl_s of a request; a step takes a second.
RETENTIONS = st.sampled_from(
    [(35, None), (35, None), (0, 5.0), (60, None), (100, 9.0), (100, None)]
)

PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=14)


def waits(one: SequenceGroup) -> bool:
    """Whether a running group cannot go on before a commit."""
    if not isinstance(one, Sequence):
        return any(beam.num_in_flight for beam in one.members)
    last_is_in_flight = one.num_output_tokens + one.num_in_flight == one.max_tokens
    return one.num_in_flight > 0 and (one.needs_committed_tokens or last_is_in_flight)


# Of pools of any size.
ANY_SETTINGS: dict[str, st.SearchStrategy[Any]] = {
    "block_size": st.sampled_from([1, 2, 4]),
    "max_prefill_chunk": st.none() | st.integers(1, 6),
    "max_draft_tokens": st.integers(1, 8),
    "steps_ahead": st.sampled_from([0, 1, 1, 2]),
    "spare_rows": st.integers(0, 6),
    "tables": TABLES,
    "host_slots": HOST_SLOTS,
}


class EngineMachine(RuleBasedStateMachine):
    """Random arrivals, cancels, suspensions and failures over random small pools.

    Steps are taken in as late as the runner allows.
    """

    forecast: KVForecast | None = None

    @initialize(
        num_blocks=st.integers(2, 10),
        max_num_seqs=st.integers(1, 4),
        max_num_batched_tokens=st.integers(1, 12),
        enable_prefix_caching=st.sampled_from([True, True, True, False]),
        stores_at_once=st.integers(1, 3),
        **ANY_SETTINGS,
    )
    def start(
        self,
        steps_ahead: int,
        spare_rows: int,
        tables: tuple[KVTable, ...],
        stores_at_once: int = 1,
        **config: int,
    ) -> None:
        self.config = config
        self.kv_tables = KVTables(tables, config["block_size"])
        self.max_rows = config["max_num_seqs"] + config["max_draft_tokens"] + spare_rows
        num_slots = config.pop("host_slots")
        tier = HostTier(num_slots) if num_slots else None
        self.now = 0.0
        self.plan = scheduler(
            forecast=self.forecast,
            tables=self.kv_tables,
            host_tier=tier,
            clock=lambda: self.now,
            max_rows=self.max_rows,
            **config,  # type: ignore[arg-type]
        )
        self.limits = PoolLimits(config["num_blocks"], self.kv_tables, self.plan.max_num_seqs)
        self.pool = self.plan._pool
        self.fake = PagedRunner(
            config["num_blocks"],
            config["block_size"],
            steps_ahead,
            kv_tables=self.kv_tables,
            host_slots=num_slots,
        )
        self.fake.draft = guess
        self.fake.stores_at_once = stores_at_once
        self.in_flight: deque[tuple[Batch, LateStep, set[int]]] = deque()  # with blocks written
        self.num_added = 0
        self.alive: dict[int, SequenceGroup] = {}
        self.scores = Scores()
        self.searches: dict[int, BeamGroup] = {}

    @rule(
        prompt_ids=PROMPTS,
        max_tokens=st.integers(1, 8),
        beam_width=st.integers(2, 3),
        stops=st.booleans(),
        early_stopping=st.booleans(),
    )
    def add_a_search(
        self, prompt_ids: list[int], max_tokens: int, beam_width: int, stops: bool, **params: bool
    ) -> None:
        self.num_added += 1
        group = beam_search(
            self.num_added, prompt_ids, max_tokens, stops, beam_width=beam_width, **params
        )
        num_blocks, unit = self.config["num_blocks"], max(self.kv_tables.spans)
        length = len(prompt_ids) + max_tokens
        common = self.kv_tables.num_blocks(len(prompt_ids) // unit * unit)
        needed = common + beam_width * (self.kv_tables.num_blocks(length - 1) - common)
        seats = min(self.config["max_num_seqs"], self.config["max_num_batched_tokens"])
        try:
            self.limits.check(group.members[0])
        except RequestError:
            assert beam_width > seats or needed > num_blocks or self._limit() < length
        else:
            assert beam_width <= seats and needed <= num_blocks
            self.plan.add(group)
            self.alive[self.num_added] = group
            self.searches[self.num_added] = group

    @rule(
        prompt_ids=PROMPTS,
        max_tokens=st.integers(1, 10),
        cache_salt=st.sampled_from(["", "", "x"]),
        priority_class=st.sampled_from(PriorityClass),
        retention=RETENTIONS,
        stops=st.booleans(),
        needs_committed_tokens=st.sampled_from([False, False, True]),
        num_drafts=st.sampled_from([0, 0, 1, 2, 5]),
        scores=st.booleans(),
    )
    def add(
        self,
        prompt_ids: list[int],
        max_tokens: int,
        cache_salt: str,
        priority_class: PriorityClass = PriorityClass.INTERACTIVE,
        retention: tuple[int, float | None] = (35, None),
        stops: bool = False,
        needs_committed_tokens: bool = False,
        num_drafts: int = 0,
        scores: bool = False,
    ) -> None:
        self.num_added += 1
        params = SamplingParams(num_prompt_logprobs=0 if scores else None)
        request = Request(
            *(self.num_added, prompt_ids, params, cache_salt),
            tenant=cache_salt,
            priority_class=priority_class,
            cache_priority=retention[0],
            cache_ttl_s=retention[1],
        )
        ends = frozenset({STOP}) if stops else frozenset()
        one = Sequence(request, max_tokens, eos_token_ids=ends)
        one.needs_committed_tokens = needs_committed_tokens
        one.num_drafts = num_drafts
        try:
            self.limits.check(one)
        except RequestError:
            assert len(prompt_ids) + max_tokens > self._limit()
        else:
            self.plan.add(one)
            self.alive[one.request_id] = one

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def add_a_follow_up(self, data: st.DataObject) -> None:
        """A prompt that repeats tokens which another request has by now."""
        other = data.draw(st.sampled_from(list(self.alive.values()))).members[-1]
        length = data.draw(st.integers(1, len(other.token_ids)))
        self.add(
            other.token_ids[:length],
            data.draw(st.integers(1, 6)),
            other.request.cache_salt,
            retention=data.draw(RETENTIONS),
            scores=data.draw(st.booleans()),
        )

    @rule()
    def step(self) -> None:
        self._step()

    @rule()
    def steps(self) -> None:
        for _ in range(4):
            self._step()

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), what=st.sampled_from(["finish", "suspend", "back and forth", "fail"]))
    def step_with_an_incident(self, data: st.DataObject, what: str) -> None:
        """Something happens between the run of a batch and its commit."""
        self._step(data.draw(st.sampled_from(list(self.alive.values()))), what)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(list(self.alive.values())))
        self.plan.finish(one)
        del self.alive[one.request_id]

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def suspend(self, data: st.DataObject) -> None:
        self.plan.suspend(data.draw(st.sampled_from(list(self.alive.values()))))

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), num_drafts=st.integers(0, 5))
    def draft(self, data: st.DataObject, num_drafts: int) -> None:
        one = data.draw(st.sampled_from(list(self.alive.values())))
        if isinstance(one, Sequence):
            one.num_drafts = num_drafts

    @invariant()
    def at_most_half_of_each_tier_is_pinned_and_a_quarter_is_not_raised(self) -> None:
        tiers = [(self.pool._evictable, self.config["num_blocks"])]
        if self.plan.host_cache is not None:
            tiers.append((self.plan.host_cache._evictable, self.plan.host_cache.num_slots))
        for order, size in tiers:
            assert order.num_pinned <= size // 2
            pins = [kept for kept in order._retained.values() if kept.priority == 100]
            assert order.num_pinned == len(pins)
            raised = [kept for kept in order._retained.values() if kept.priority > 35]
            assert order.num_raised == len(raised) <= size * 3 // 4

    @invariant()
    def only_cached_blocks_are_retained(self) -> None:
        assert all(map(self.pool.is_shared, self.pool._evictable._retained))
        host = self.plan.host_cache
        assert host is None or host._evictable._retained.keys() <= host._slots.keys()

    @rule()
    def resume_all(self) -> None:
        for one in list(self.plan.suspended):
            self.plan.resume(one)

    def _step(self, victim: SequenceGroup | None = None, what: str = "") -> None:
        self.now += 1
        before = list(self.plan.running)
        first_waits = bool(before) and waits(before[0])
        self.plan.stored(self.fake.take_stored())
        batch = self.plan.schedule()
        self._check(batch, before, first_waits)
        if batch.chunks:
            pending = self.fake.launch(batch)
            self.in_flight.append((batch, pending, self.fake.written))
        if victim is not None:
            if what in ("suspend", "back and forth"):
                self.plan.suspend(victim)
            if what == "back and forth":
                self.plan.resume(victim)
            if what == "finish":
                self.plan.finish(victim)
                del self.alive[victim.request_id]
        if len(self.in_flight) > (self.fake.steps_ahead if batch.chunks else 0):
            self._take(victim if what == "fail" else None)

    def _take(self, failing: SequenceGroup | None) -> None:
        batch, pending, _ = self.in_flight.popleft()
        output = pending.result()
        for index, chunk in enumerate(batch.chunks):
            if chunk.sequence.group is failing:
                output.errors[index] = "numerical"
        ours = [chunk.sequence for chunk in batch.chunks if not chunk.is_stale]
        committed = self.plan.commit(batch, output)
        self.scores.add(committed)
        moved = [each.sequence for each in committed]
        for index in output.errors:
            failed = batch.chunks[index].sequence
            assert failed not in moved
            if failed in ours and self.alive.pop(failed.group.request_id, None) is not None:
                self.plan.finish(failed.group)
        for owner in dict.fromkeys(one.beam_of for one in moved if one.beam_of is not None):
            own = [each for each in committed if each.sequence.beam_of is owner]
            assert tuple(each.sequence for each in own) == owner.members, "not in step"
            assert not any(each.token_ids for each in own), "a token that no search has chosen"
            group = self.searches[owner.request_id]
            group.advance(own, self.plan)
            if group.is_finished:
                assert best_outputs(group) == searched_alone(group)
                self.plan.finish(group)
                del self.alive[group.request_id]
        for each in committed:
            one = each.sequence
            assert one in ours
            if one.beam_of is not None:
                continue
            known = scores_of(one)[: one.num_scored - 1]
            assert self.scores[one] == known, "a score twice, or lost"
            if not each.token_ids:
                continue
            prompt_ids = one.request.prompt_ids
            assert one.token_ids[len(prompt_ids) :] == alone(prompt_ids, one.num_output_tokens)
            assert one.num_output_tokens <= one.max_tokens
            assert one.num_accepted <= one.num_drafted
            assert one.num_output_tokens == one.num_steps + one.num_accepted
            assert self.scores[one] == scores_of(one), "a score is missing"
            assert one.token_ids[-len(each.token_ids) :] == each.token_ids
            assert len(each.logprobs) == len(each.token_ids)
            ended = not one.eos_token_ids.isdisjoint(each.token_ids)
            if one.num_output_tokens == one.max_tokens or ended:
                self.plan.finish(one)
                del self.alive[one.request_id]

    def _limit(self) -> int:
        """The longest sequence for which there is a block in each table."""
        lengths = range(self.config["num_blocks"] * max(self.kv_tables.spans) + 1)
        num_blocks = self.config["num_blocks"]
        return max(n for n in lengths if self.kv_tables.num_blocks(n) <= num_blocks)

    def _blocks_of(self, chunk: Chunk) -> list[int]:
        """The blocks that a chunk may write to."""
        first = min(chunk.start, len(chunk.sequence.token_ids) - 1)
        return [
            block
            for table, span in zip(chunk.sequence.tables, self.kv_tables.spans, strict=True)
            for block in table[first // span : (chunk.end - 1) // span + 1]
        ]

    def _in_flight_of(self, one: Sequence) -> list[Chunk]:
        return [
            chunk
            for batch, _, _ in self.in_flight
            for chunk in batch.chunks
            if chunk.sequence is one and not chunk.is_stale
        ]

    def _check(self, batch: Batch, before: list[SequenceGroup], first_waits: bool) -> None:
        running = list(self.plan.running)
        if running or self.plan.waiting:
            admitted = running != before
            busy = self.in_flight or self.fake.storing
            assert batch.chunks or busy or admitted, "work, but no progress"
        assert batch.num_tokens <= self.config["max_num_batched_tokens"]
        num_drafts = sum(chunk.num_drafts for chunk in batch.chunks)
        assert num_drafts <= self.config["max_draft_tokens"]
        num_rows = sum(max(1, rows_of(chunk)) for chunk in batch.chunks)
        assert num_rows <= self.max_rows
        seats = sum(len(one.members) for one in running)
        assert seats <= self.plan._num_batch_slots <= self.config["max_num_seqs"]
        stayed = [one for one in running if one in before]
        assert stayed == before[: len(stayed)], "an older one lost its blocks to a younger one"
        assert running[: len(stayed)] == stayed, "a preempted one came back in the same step"
        scheduled = [chunk.sequence for chunk in batch.chunks]
        assert len(scheduled) == len(set(scheduled))
        if before:
            first_advances = before[0] in [one.group for one in scheduled]
            assert first_advances != first_waits, "the first does not advance"
        for chunk in batch.chunks:
            one = chunk.sequence
            assert one.group.status is Status.RUNNING
            assert chunk.end == one.num_computed
            assert chunk.num_drafts <= one.num_drafts
            length = chunk.length - chunk.num_drafts
            assert 1 <= length <= (self.config["max_prefill_chunk"] or length)
            # Exactly what its steps that are not committed may choose at most, this one included.
            steps = [chunk, *self._in_flight_of(one)]
            assert one.num_in_flight == sum(1 + each.num_drafts for each in steps if each.samples)
            assert len(steps) <= self.fake.steps_ahead + 1
            if (
                one.needs_committed_tokens
                and chunk.samples
                and chunk.start >= one.num_prompt_tokens
            ):
                assert not any(each.samples for each in steps[1:])
            assert one.num_tokens <= one.max_length
            assert len(chunk.scored_ids) == chunk.num_scores
            assert not (chunk.num_scores and chunk.num_drafts)
            assert rows_of(chunk) <= chunk.length
            for block in self._blocks_of(chunk):
                # A beam may compute for all of its search what they have lost together.
                owners = [each for each in one.group.members if block in owned_by(each)]
                if one.beam_of is not None and not chunk.samples:
                    assert self.pool._hashes[block] is None, "a write that others see"
                    assert self.pool.ref_count(block) == len(owners)
                else:
                    assert not self.pool.is_shared(block), "a write that others see"
                    assert self.pool.ref_count(block) == 1
        targets = [target for _, target in batch.copies]
        assert len(targets) == len(set(targets))
        assert not set(targets) & {source for source, _ in batch.copies}

    @invariant()
    def every_block_has_the_owners_that_it_counts(self) -> None:
        if not hasattr(self, "plan"):
            return
        owners = [0] * self.config["num_blocks"]
        for one in self.plan.running:
            for each in one.members:
                for block in owned_by(each):
                    owners[block] += 1
        if self.plan.host_cache is not None:
            for store in self.plan.host_cache._in_flight.values():
                owners[store.block] += 1
        assert owners == [self.pool.ref_count(block) for block in range(len(owners))]
        tables = self.plan._tables
        assert tables.num_reserved == sum(map(tables.num_reserved_for, self.plan.running))
        assert self.plan._num_batch_slots == sum(one.width for one in self.plan.running)
        for one in [*self.plan.waiting, *self.plan.suspended]:
            for each in one.members:
                assert owned_by(each) == [] and each.num_computed == each.capacity == 0
        places = [*self.plan.running, *self.plan.waiting, *self.plan.suspended]
        assert {one.request_id: one for one in places} == self.alive
        assert len(places) == len(self.alive)

    @invariant()
    def no_step_in_flight_writes_what_others_may_find(self) -> None:
        for _, _, written in getattr(self, "in_flight", ()):
            assert not written & set(self.pool._by_hash.values())

    def teardown(self) -> None:
        if not hasattr(self, "plan"):
            return
        self.resume_all()
        bound = 1 + sum(
            one.width * (one.num_prompt_tokens + 2 * one.members[0].max_tokens)
            for one in self.alive.values()
        ) * (1 + len(self.alive)) * (1 + self.fake.steps_ahead)
        bound += self.config["num_blocks"] * self.num_added  # stores that it waits for
        for _ in range(bound):
            if not self.alive:
                break
            self._step()
        assert not self.alive, "some request never ends"
        while self.in_flight or self.fake.storing:
            self._step()
        assert self.plan.num_free_blocks == self.config["num_blocks"]


EngineMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestRandomTraffic = EngineMachine.TestCase


class SearchMachine(EngineMachine):
    """The same with room for several beam searches, but hardly for their ends."""

    @initialize(
        num_blocks=st.integers(8, 16),
        max_num_seqs=st.integers(4, 8),
        max_num_batched_tokens=st.integers(8, 16),
        enable_prefix_caching=st.booleans(),
        prompts=st.lists(PROMPTS, min_size=2, max_size=4),
        **ANY_SETTINGS,
    )
    def start(
        self,
        steps_ahead: int,
        spare_rows: int,
        tables: tuple[KVTable, ...],
        prompts: list[list[int]],
        **config: int,
    ) -> None:
        super().start(steps_ahead, spare_rows, tables, **config)
        for index, prompt_ids in enumerate(prompts):
            self.add_a_search(prompt_ids, 8, 2 + index % 2, index % 2 == 0, early_stopping=False)


SearchMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestRandomSearches = SearchMachine.TestCase


class CacheMachine(EngineMachine):
    """Prompts that begin like others, with windows, and room for some of them in the cache."""

    @initialize(
        num_blocks=st.integers(20, 50),
        max_num_seqs=st.integers(1, 3),
        max_num_batched_tokens=st.integers(8, 40),
        host_slots=st.sampled_from([0, 10, 60]),
        steps_ahead=st.sampled_from([0, 1]),
        tables=st.sampled_from(
            [
                (KVTable(kernel_blocks=2), KVTable((), 5, 1, 2)),
                (KVTable(), KVTable((), 3, 1, 1)),
                (KVTable((), 6, 1, 4),),
            ]
        ),
        common=st.lists(st.integers(0, 1), min_size=8, max_size=16),
    )
    def start(
        self, steps_ahead: int, tables: tuple[KVTable, ...], common: list[int], **config: int
    ) -> None:
        more = {"block_size": 1, "max_prefill_chunk": None, "max_draft_tokens": 2}
        super().start(steps_ahead, 4, tables, enable_prefix_caching=True, **more, **config)
        self.common = common

    @rule(
        end=st.lists(st.integers(0, 1), max_size=14),
        length=st.integers(4, 16),
        retention=RETENTIONS,
    )
    def add_a_similar_prompt(
        self, end: list[int], length: int, retention: tuple[int, float | None]
    ) -> None:
        self.add([*self.common[:length], *end], 2, "", retention=retention)


CacheMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestRandomPrefixes = CacheMachine.TestCase


class TierMachine(EngineMachine):
    """Prompts that begin like earlier ones, which the pool has lost and host memory has kept."""

    @initialize(
        num_blocks=st.integers(10, 16),
        max_num_seqs=st.integers(1, 4),
        max_num_batched_tokens=st.integers(4, 40),
        steps_ahead=st.sampled_from([0, 1, 1, 2]),
        host_slots=st.sampled_from([6, 30, 90]),
        stores_at_once=st.integers(1, 4),
        tables=st.sampled_from(
            [
                (KVTable(),),
                (KVTable(),),
                (KVTable(kernel_blocks=2), KVTable((), 3, 1, 2)),
                (KVTable((), 5, 1, 2),),
            ]
        ),
        chats=st.lists(st.lists(st.integers(0, 1), min_size=6, max_size=6), min_size=2, max_size=4),
    )
    def start(
        self,
        steps_ahead: int,
        tables: tuple[KVTable, ...],
        stores_at_once: int,
        chats: list[list[int]],
        **config: int,
    ) -> None:
        more = {"block_size": 1, "max_prefill_chunk": None, "max_draft_tokens": 2}
        super().start(
            steps_ahead, 4, tables, stores_at_once, enable_prefix_caching=True, **more, **config
        )
        self.chats = chats

    @rule(
        which=st.integers(0, 3),
        end=st.lists(st.integers(0, 1), max_size=2),
        retention=RETENTIONS,
    )
    def add_a_turn(self, which: int, end: list[int], retention: tuple[int, float | None]) -> None:
        self.add([*self.chats[which % len(self.chats)], *end], 2, "", retention=retention)
        self.take_turns()

    @rule(which=st.integers(0, 3), beam_width=st.integers(2, 3))
    def add_a_search_of_a_chat(self, which: int, beam_width: int) -> None:
        prompt_ids = self.chats[which % len(self.chats)]
        self.add_a_search(prompt_ids, 2, beam_width, False, early_stopping=False)
        self.take_turns()

    @rule()
    def take_turns(self) -> None:
        """Enough steps for most requests to end, and for their blocks to be stored."""
        for _ in range(8):
            self._step()

    @precondition(lambda self: not self.in_flight)
    @rule()
    def fail_a_launch(self) -> None:
        """As the engine does: the requests of the batch fail, then the rest is forgotten."""
        self.plan.stored(self.fake.take_stored())
        batch = self.plan.schedule()
        for chunk in batch.chunks:
            group = chunk.sequence.group
            if self.alive.pop(group.request_id, None) is not None:
                self.plan.finish(group)
        self.plan.abandon(batch)


TierMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestRandomTiers = TierMachine.TestCase


class ForecastMachine(EngineMachine):
    """Admissions keep blocks free for growth, by lengths of outputs that may be far off."""

    @initialize(
        num_blocks=st.integers(4, 24),
        max_num_seqs=st.integers(2, 8),
        max_num_batched_tokens=st.integers(2, 24),
        enable_prefix_caching=st.booleans(),
        share=st.sampled_from([0.1, 0.5, 1.0]),
        earlier=st.lists(st.tuples(st.integers(0, 12), st.booleans()), min_size=1, max_size=4),
        **ANY_SETTINGS,
    )
    def start(
        self,
        steps_ahead: int,
        spare_rows: int,
        tables: tuple[KVTable, ...],
        share: float,
        earlier: list[tuple[int, bool]],
        **config: int,
    ) -> None:
        lengths = OutputLengths()
        key: QueueKey = (PriorityClass.INTERACTIVE, "")
        for index in range(MIN_SAMPLES):
            num_tokens, is_cut = earlier[index % len(earlier)]
            lengths.observe(key, num_tokens, is_cut)
        self.forecast = KVForecast(
            KVTables(tables, config["block_size"]),
            config["max_num_seqs"],
            max(1, int(share * config["num_blocks"])),
            lengths,
        )
        super().start(steps_ahead, spare_rows, tables, **config)

    @invariant()
    def the_forecast_is_of_the_groups_that_run(self) -> None:
        if self.forecast is not None:
            running = {one.request_id for one in self.plan.running}
            assert self.forecast._places.keys() == running == set(self.forecast._ids)


ForecastMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestRandomForecasts = ForecastMachine.TestCase
