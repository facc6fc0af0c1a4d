"""Settings reach the scheduler."""

from __future__ import annotations

from counting_engine import make_engine, request, run


def _num_preemptions(**settings: float) -> int:
    """Of eight requests, four of which fill the pool at their ends."""
    engine = make_engine(enable_prefix_caching=False, **settings)
    for index in range(8):
        engine.submit(request(index, [1] * 24, max_tokens=40, ignore_eos=True))
    assert all(events[-1].finish_reason == "length" for events in run(engine).values())
    return engine.stats().num_preemptions


def test_blocks_for_growth_make_preemptions_rarer() -> None:
    assert _num_preemptions(kv_growth_reserve=0.5) < _num_preemptions(kv_growth_reserve=0)
