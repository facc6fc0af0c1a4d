"""Work that the user can stop."""

from __future__ import annotations

import asyncio

import pytest

from inflight.cli.bench.serving.stopping import unless_stopped


def test_work_that_ends_first_has_its_result_or_error() -> None:
    async def work(divisor: int) -> float:
        await asyncio.sleep(0)
        return 6 / divisor

    assert asyncio.run(unless_stopped_now(work(3))) == 2.0
    with pytest.raises(ZeroDivisionError):
        asyncio.run(unless_stopped_now(work(0)))


async def unless_stopped_now(work):  # type: ignore[no-untyped-def]
    return await unless_stopped(asyncio.Event(), work)


def test_stopping_cancels_the_work_and_waits_for_its_end() -> None:
    ended = []

    async def work() -> None:
        try:
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(0.01)
            ended.append(True)

    async def run() -> object:
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(0.02, stop.set)
        return await unless_stopped(stop, work())

    assert asyncio.run(run()) is None
    assert ended == [True]
