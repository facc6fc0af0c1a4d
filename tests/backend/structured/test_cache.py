"""The cache respects its limit and keeps recently used items."""

from hypothesis import given
from hypothesis import strategies as st

from inflight.structured.cache import BoundedCache


def test_least_recently_used_goes_first() -> None:
    cache: BoundedCache[str, int] = BoundedCache(30)
    for number, key in enumerate("abc"):
        cache.put(key, number, 10)
    assert cache.get("a") == 0
    cache.put("d", 3, 10)
    assert [cache.get(key) for key in "abcd"] == [0, None, 2, 3]


def test_items_larger_than_the_cache_are_not_kept() -> None:
    cache: BoundedCache[str, int] = BoundedCache(30)
    cache.put("a", 1, 10)
    cache.put("b", 2, 31)
    assert (cache.get("a"), cache.get("b"), cache.num_bytes) == (1, None, 10)
    cache.put("a", 3, 31)  # and does not leave an older value behind
    assert (cache.get("a"), cache.num_bytes, len(cache)) == (None, 0, 0)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 60), st.booleans())))
def test_sizes_add_up_and_stay_within_the_bound(steps: list[tuple[int, int, bool]]) -> None:
    cache: BoundedCache[int, int] = BoundedCache(100)
    sizes: dict[int, int] = {}
    for key, size, discard in steps:
        if discard:
            cache.discard(key)
        else:
            cache.put(key, size, size)
            sizes[key] = size
        present = [found for each in range(6) if (found := cache.get(each)) is not None]
        assert cache.num_bytes == sum(present) <= 100
        assert len(cache) == len(present)
