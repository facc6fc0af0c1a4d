"""Who waits is served by weight, and who does not gathers no credit."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from inflight.scheduling import virtual_counters
from inflight.scheduling.virtual_counters import VirtualCounters


def serve(counters: VirtualCounters, times: int, num_tokens: int = 1) -> str:
    served = ""
    for _ in range(times):
        served += (name := counters.least())
        counters.charge(name, num_tokens)
    return served


def test_equals_take_turns_in_the_order_in_which_they_came() -> None:
    counters = VirtualCounters()
    for name in "bca":
        counters.enter(name)
    counters.enter("c")
    assert serve(counters, 7) == "bcabcab"


def test_weights_are_shares() -> None:
    counters = VirtualCounters({"a": 3})
    counters.enter("a")
    counters.enter("b")
    assert Counter(serve(counters, 400)) == {"a": 300, "b": 100}


@given(
    weights=st.lists(st.integers(1, 5), min_size=2, max_size=5),
    sizes=st.lists(st.integers(1, 100), min_size=1, max_size=60),
)
def test_those_that_wait_differ_by_one_service_at_most(
    weights: list[int], sizes: list[int]
) -> None:
    names = {str(number): weight for number, weight in enumerate(weights)}
    counters = VirtualCounters(names)
    served = dict.fromkeys(names, 0)
    for name in names:
        counters.enter(name)
    for size in sizes:
        name = counters.least()
        counters.charge(name, size)
        served[name] += size
        shares = [served[one] / weight for one, weight in names.items()]
        assert max(shares) - min(shares) <= max(sizes) + 1e-6


def test_to_be_idle_gathers_no_credit() -> None:
    counters = VirtualCounters()
    counters.enter("a")
    counters.enter("b")
    counters.leave("b")
    serve(counters, 1000)
    counters.enter("b")
    counters.enter("c")
    assert Counter(serve(counters, 300)) == {"a": 100, "b": 100, "c": 100}


def test_who_was_served_while_idle_waits_for_the_others() -> None:
    counters = VirtualCounters()
    counters.enter("a")
    counters.enter("b")
    counters.leave("a")
    counters.charge("a", 5)
    counters.enter("a")
    assert serve(counters, 8) == "bbbbbbab"


def test_who_comes_to_an_empty_queue_starts_where_the_last_one_is() -> None:
    counters = VirtualCounters()
    counters.enter("a")
    counters.leave("a")
    counters.charge("a", 100)  # once it runs
    counters.enter("b")
    counters.enter("a")
    assert serve(counters, 4) == "baba"


def test_any_number_of_names_takes_bounded_memory() -> None:
    counters = VirtualCounters()
    names = [chr(number) for number in range(1000, 1000 + 2 * virtual_counters.MAX_IDLE)]
    for name in names:
        counters.enter(name)
        counters.leave(name)
        counters.charge(name, 10)
    assert len(counters._idle) == virtual_counters.MAX_IDLE
    # One that was forgotten is as a new one: neither behind nor ahead.
    first, last = names[0], names[-1]
    counters.enter(first)
    counters.enter(last)
    assert serve(counters, 4) == 2 * (first + last)
