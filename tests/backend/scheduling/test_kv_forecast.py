"""How many blocks are kept free for the growth of running groups."""

from __future__ import annotations

import time

import numpy as np
import pytest

from inflight.core.request import PriorityClass, Request
from inflight.core.sequence import Sequence
from inflight.kv.layout import KVTable, KVTables
from inflight.sampling.params import SamplingParams
from inflight.scheduling.kv_forecast import KVForecast
from inflight.scheduling.output_lengths import MIN_SAMPLES, OutputLengths
from inflight.scheduling.waiting_queue import QueueKey
from scheduling import beam_search

KEY: QueueKey = (PriorityClass.INTERACTIVE, "")
ALL = 1 << 30
SINGLE = KVTables.single(16)


def known(found: list[int]) -> OutputLengths:
    lengths = OutputLengths()
    for num_tokens in found:
        lengths.observe(KEY, num_tokens, is_cut=False)
    return lengths


def running(
    request_id: int, num_prompt: int, num_output: int, max_tokens: int, ignore_eos: bool = False
) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)
    one = Sequence(Request(request_id, [1] * num_prompt, params), max_tokens)
    one.token_ids += [1] * num_output
    return one


def forecast(
    groups: list[Sequence], lengths: OutputLengths | None = None, tables: KVTables = SINGLE
) -> int:
    """For all of these: the last one is to be admitted."""
    found = KVForecast(tables, len(groups), ALL, lengths)
    for one in groups[:-1]:
        found.add(one, 0)
    return found.blocks_for(groups[-1], 0)


def test_a_known_end_is_a_known_peak() -> None:
    # Each grows by 20 blocks, all at once.
    together = [running(index, 160, 0, 321, True) for index in range(10)]
    assert forecast(together) == 10 * 20
    # One after another: the peak is that of all when the first one ends, or of later ones.
    in_turns = [running(index, 160, 32 * index, 321, True) for index in range(10)]
    left = [320 - 32 * index for index in range(10)]
    peak = max(
        sum((160 + 32 * i + at) // 16 for i in range(10) if left[i] >= at) for at in left
    ) - sum((160 + 32 * i) // 16 for i in range(10))
    assert forecast(in_turns) == pytest.approx(peak, abs=5)


def test_nothing_is_kept_before_lengths_are_known() -> None:
    groups = [running(index, 160, 0, 4000) for index in range(10)]
    assert forecast(groups, known([300] * (MIN_SAMPLES - 1))) == 0
    assert forecast(groups, known([300] * MIN_SAMPLES)) > 0


def test_max_tokens_bounds_what_is_expected() -> None:
    lengths = known([3000] * MIN_SAMPLES)
    assert forecast([running(index, 160, 0, 33) for index in range(10)], lengths) <= 10 * 2


def test_usage_stays_within_the_forecast() -> None:
    rng = np.random.default_rng(0)
    drawn = rng.lognormal(5.5, 0.8, 4000).astype(int) + 1
    lengths = known(drawn[:1000].tolist())
    exceeded = 0
    for _ in range(40):
        own = rng.choice(drawn[1000:], 64)
        done = (own * rng.random(64)).astype(int)
        groups = [running(i, 100, int(done[i]), 8000) for i in range(64)]
        now = int((-(-(100 + done) // 16)).sum())
        usages = [
            int((-(-(100 + done + at) // 16) * (own > done + at)).sum())
            for at in range(0, 3000, 10)
        ]
        exceeded += max(usages) - now > forecast(groups, lengths)
    assert exceeded <= 1


def test_groups_that_free_more_than_others_grow_need_nothing() -> None:
    lengths = known([40] * MIN_SAMPLES)
    groups = [running(index, 4000, 30 + index % 10, 4000) for index in range(64)]
    assert forecast(groups, lengths) < 64


def test_shared_blocks_are_not_freed_by_one_of_their_owners() -> None:
    lengths = known([40] * MIN_SAMPLES)
    long, short = (KVForecast(SINGLE, 8, ALL, lengths) for _ in range(2))
    for index in range(7):
        long.add(running(index, 4000, 30, 4000), 250)
        short.add(running(index, 16, 30, 4000), 1)
    last = running(7, 16, 30, 4000)
    assert long.blocks_for(last, 0) == short.blocks_for(last, 0) > 0


def test_windows_bound_the_growth() -> None:
    tables = KVTables((KVTable((), 64, 1, 16),), 16)
    groups = [running(index, 400, 0, 4001, True) for index in range(4)]
    assert forecast(groups, tables=tables) <= 4 * 2
    assert forecast(groups) == 4 * 250


def test_all_beams_grow() -> None:
    group = beam_search(1, [1] * 160, max_tokens=321, stops=False, beam_width=3)
    found = KVForecast(SINGLE, 4, ALL, known([100_000] * MIN_SAMPLES))
    assert found.blocks_for(group, 0) == pytest.approx(3 * 20, abs=1)


def test_no_more_is_kept_than_allowed_and_nothing_where_more_is_free() -> None:
    groups = [running(index, 160, 0, 4001, True) for index in range(4)]
    found = KVForecast(SINGLE, 4, 30)
    for one in groups[:-1]:
        found.add(one, 0)
    assert found.blocks_for(groups[-1], 0) == 30
    assert found.blocks_for(groups[-1], 39) == 30
    assert found.blocks_for(groups[-1], 40) == 0, "10 blocks are its own"


def test_groups_leave_in_any_order() -> None:
    groups = [running(index, 16 * index, 0, 100 + index, True) for index in range(1, 9)]
    found = KVForecast(SINGLE, 8, ALL)
    for one in groups[:-1]:
        found.add(one, 0)
    for index in (3, 0, 5):
        found.remove(groups[index])
    left = [groups[index] for index in (1, 2, 4, 6, 7)]
    assert found.blocks_for(groups[-1], 0) == forecast(left)


def test_only_lengths_that_requests_chose_themselves_are_learned() -> None:
    lengths = OutputLengths()
    found = KVForecast(SINGLE, 2, ALL, lengths)
    for index in range(MIN_SAMPLES):
        one = running(index, 16, 20, 20, True)
        found.add(one, 0)
        found.ended(one)
        found.remove(one)
    assert not lengths.is_known


@pytest.mark.alone
def test_a_forecast_of_256_groups_takes_no_part_of_a_step() -> None:
    rng = np.random.default_rng(0)
    lengths = known((rng.lognormal(5.5, 1.0, 500).astype(int) + 1).tolist())
    groups = [running(index, 300, int(rng.integers(1, 500)), 4096) for index in range(256)]
    found = KVForecast(SINGLE, 256, ALL, lengths)
    for one in groups[:-1]:
        found.add(one, 0)
    fastest = 1.0
    for _ in range(100):
        found.remove(groups[0])
        found.add(groups[0], 0)
        begun = time.perf_counter()
        found.blocks_for(groups[-1], 0)
        fastest = min(fastest, time.perf_counter() - begun)
    assert fastest < 300e-6
