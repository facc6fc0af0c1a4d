"""The lag of the event loop."""

from __future__ import annotations

import asyncio
import time

from inflight.cli.bench.serving.lag import LagMeter


def test_a_blocked_loop_is_seen() -> None:
    async def run() -> list[float]:
        async with LagMeter() as lag:
            await asyncio.sleep(0.05)
            time.sleep(0.2)
            await asyncio.sleep(0.05)
        return lag.samples_s

    samples = asyncio.run(run())
    # The timer was due up to 10 ms after the loop was blocked.
    assert max(samples) > 0.18
    assert all(sample >= 0 for sample in samples)
