"""Sequences whose prefix is in host memory load it beside the steps of others."""

from __future__ import annotations

from fake_runner import PagedRunner, alone
from inflight.core.batch import Batch
from inflight.core.sequence import Sequence, Status
from inflight.kv.tiers.host_cache import HostTier
from inflight.scheduling.scheduler import Scheduler
from scheduling import lengths, prompt, run_all, scheduler, sequence

SIZE = 4
CHAT = [one % 3 for one in prompt(4 * SIZE)]


def _setting(num_blocks: int = 400, **changes: int) -> tuple[Scheduler, PagedRunner]:
    one = scheduler(num_blocks=num_blocks, block_size=SIZE, host_tier=HostTier(200), **changes)
    return one, PagedRunner(num_blocks, SIZE, host_slots=200)


def _run(plan: Scheduler, fake: PagedRunner, *sequences: Sequence) -> None:
    """Run sequences to their ends, store all of their blocks, and evict these from the pool."""
    for one in sequences:
        plan.add(one)
    while plan.running or plan.waiting or fake.storing:
        _step(plan, fake)
    pool = plan._pool
    pool.release([pool.allocate() for _ in range(pool.num_free)])


def _step(plan: Scheduler, fake: PagedRunner) -> Batch:
    plan.stored(fake.take_stored())
    batch = plan.schedule()
    for each in plan.commit(batch, fake.launch(batch).result()):
        if each.sequence.num_output_tokens == each.sequence.max_tokens:
            plan.finish(each.sequence)
    return batch


def test_the_only_sequence_computes_in_the_step_that_loads() -> None:
    plan, fake = _setting()
    _run(plan, fake, sequence(1, CHAT))
    again = sequence(2, [*CHAT, 1, 2])
    plan.add(again)
    batch = plan.schedule()
    assert len(batch.loads) == 4
    assert batch.reads_loads
    assert lengths(batch) == {2: 2}
    plan.commit(batch, fake.launch(batch).result())
    assert again.token_ids[-1:] == alone([*CHAT, 1, 2], 1)
    assert plan.num_cached_tokens == 4 * SIZE


def test_others_do_not_wait_for_loads() -> None:
    plan, fake = _setting()
    _run(plan, fake, sequence(1, CHAT))
    plan.add(sequence(2, [1, 2]))
    _step(plan, fake)
    plan.add(sequence(3, [*CHAT, 1, 2]))
    batch = plan.schedule()
    assert lengths(batch) == {2: 1}
    assert len(batch.loads) == 4
    assert not batch.reads_loads
    plan.commit(batch, fake.launch(batch).result())
    assert lengths(_step(plan, fake)) == {2: 1, 3: 2}


def test_a_prompt_that_is_all_there_computes_its_last_token() -> None:
    plan, fake = _setting()
    _run(plan, fake, sequence(1, CHAT))
    again = sequence(2, CHAT)
    plan.add(again)
    batch = plan.schedule()
    assert lengths(batch) == {2: 1}
    assert batch.copies == []  # the block is its own until it is cached
    plan.commit(batch, fake.launch(batch).result())
    assert again.token_ids[-1:] == alone(CHAT, 1)


def test_two_requests_with_one_prefix_load_it_once() -> None:
    chat = [one % 3 for one in prompt(300)]
    plan, fake = _setting(num_blocks=800, max_num_batched_tokens=512)
    _run(plan, fake, sequence(1, chat, max_tokens=60))
    loaded = []
    for request_id in (2, 3):
        plan.add(sequence(request_id, [*chat, 1]))
    while plan.running or plan.waiting:
        loaded += _step(plan, fake).loads
    assert len(loaded) == 300 // SIZE


def test_a_failed_launch_requeues_those_that_loaded_beside_it() -> None:
    plan, fake = _setting()
    _run(plan, fake, sequence(1, CHAT))
    plan.add(sequence(2, [1, 2]))
    _step(plan, fake)
    loading = sequence(3, [*CHAT, 1, 2])
    plan.add(loading)
    batch = plan.schedule()
    assert lengths(batch) == {2: 1}
    for chunk in batch.chunks:
        plan.finish(chunk.sequence)
    plan.abandon(batch)
    assert loading.status is Status.WAITING
    run_all(plan, fake)
    assert loading.token_ids[-4:] == alone([*CHAT, 1, 2], 4)


def test_a_cancelled_load_does_not_overwrite_the_next_owner() -> None:
    plan, fake = _setting()
    _run(plan, fake, sequence(1, CHAT))
    loading = sequence(2, [*CHAT, 1, 2])
    plan.add(loading)
    first = plan.schedule()
    pending = fake.launch(first)
    plan.finish(loading)
    other = sequence(3, [2] * 20)
    plan.add(other)
    second = plan.schedule()
    plan.commit(first, pending.result())
    plan.commit(second, fake.launch(second).result())
    run_all(plan, fake)
    assert other.token_ids[-4:] == alone([2] * 20, 4)


def test_what_is_computed_sooner_is_not_loaded() -> None:
    for min_tokens, loaded in ((16, 4), (17, 0)):
        plan = scheduler(num_blocks=400, block_size=SIZE, host_tier=HostTier(200, min_tokens))
        fake = PagedRunner(400, SIZE, host_slots=200)
        _run(plan, fake, sequence(1, CHAT))
        plan.add(sequence(2, [*CHAT, 1]))
        assert len(plan.schedule().loads) == loaded


def test_what_the_pool_serves_stays_in_host_memory() -> None:
    """Blocks that are in use on the device are not the ones that host memory gives up."""
    plan = scheduler(num_blocks=400, block_size=SIZE, host_tier=HostTier(8))
    fake = PagedRunner(400, SIZE, host_slots=8)
    older, newer = [[first] * 3 + CHAT for first in (1, 2)]
    requests = [CHAT, older[: 2 * SIZE], [*CHAT, 1], newer[: 4 * SIZE]]
    for request_id, prompt_ids in enumerate(requests):
        plan.add(sequence(request_id, prompt_ids, max_tokens=1))
        while plan.running or plan.waiting:
            _step(plan, fake)
        fake.storing += plan.plan_stores().stores
        plan.stored(fake.take_stored())
    host = plan.host_cache
    assert host is not None
    assert host.num_evicted == 2
    keys = plan._tables._hashes_of(sequence(9, CHAT), len(CHAT))
    assert all(key in host for key in keys)


def test_few_blocks_are_loaded_at_a_time() -> None:
    """No more than a step computes, so that a step is not held up for long."""
    plan, fake = _setting(max_num_seqs=8)
    chats = [[(one + index) % 3 for one in CHAT] for index in range(3)]
    for index, chat in enumerate(chats):
        _run(plan, fake, sequence(10 + index, chat))
    plan.add(sequence(1, [1, 2]))
    _step(plan, fake)
    for index, chat in enumerate(chats):
        plan.add(sequence(20 + index, [*chat, index]))
    batch = plan.schedule()
    assert 4 <= len(batch.loads) <= 8
    plan.commit(batch, fake.launch(batch).result())
    run_all(plan, fake)
