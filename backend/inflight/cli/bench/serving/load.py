"""Runs one level of load against a target and records what arrives.

A closed loop keeps a number of requests in flight: one that ends is followed by the next one. An
open loop sends requests at given times, whether or not earlier ones have been answered, as
independent users do; under overload its queue grows without bound (Schroeder et al., NSDI 2006).
Its latencies count from the time at which a request was due.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from inflight.cli.bench.serving.lag import LagMeter
from inflight.cli.bench.serving.results.measured import Measured
from inflight.cli.bench.serving.results.records import GIVEN_UP, UNFINISHED, Record
from inflight.cli.bench.serving.results.window import CoolDown, Window
from inflight.cli.bench.serving.stopping import unless_stopped
from inflight.cli.bench.serving.targets.target import Prompt, Target
from inflight_client import ClientError

GIVEN_UP_TEXT = "cancelled when it could no longer meet the SLO; its latencies are those until then"
_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Limit:
    """When a level stops sending; requests in flight then run to their end.

    Attributes:
        num_requests: after so many; None for no such limit.
        duration_s: after so long; None for no such limit.
        ramp_s: of an open loop: if above 0, the limits begin after it, and the level goes on
            sending until the requests within the limits have ended (see `results.window`).
    """

    num_requests: int | None = None
    duration_s: float | None = None
    ramp_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Progress:
    """Of a running level."""

    num_sent: int
    num_in_flight: int
    num_tokens: int
    elapsed_s: float


class LoadGenerator:
    """One level of load.

    Args:
        target: where requests go.
        next_prompt: makes the next request's prompt.
        limit: when to stop; at least one of its fields is set.
        stop: ends the level early when set; requests in flight are cancelled.
    """

    def __init__(
        self,
        target: Target,
        next_prompt: Callable[[], Prompt],
        limit: Limit,
        stop: asyncio.Event,
    ) -> None:
        self._target = target
        self._next_prompt = next_prompt
        self._limit = limit
        self._stop = stop
        self._records: list[Record] = []
        self._examples: dict[str, str] = {}
        self._late_s: list[float] = []
        self._started = 0.0
        self._num_ended = 0
        self._num_tokens = 0
        self._window: Window | None = None
        self._next_due_s = 0.0

    def progress(self) -> Progress:
        return Progress(
            num_sent=len(self._records),
            num_in_flight=len(self._records) - self._num_ended,
            num_tokens=self._num_tokens,
            elapsed_s=time.perf_counter() - self._started if self._started else 0.0,
        )

    async def closed(self, concurrency: int) -> Measured:
        """Keep `concurrency` requests in flight."""

        async def work() -> None:
            while self._may_send():
                await self._request(self._next_prompt())

        async def run() -> bool:
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(work())
            return True

        return await self._measure(run)

    async def open(self, arrivals: Iterator[float]) -> Measured:
        """Send at the given times, in seconds from the start."""

        async def run() -> bool:
            async with asyncio.TaskGroup() as group:
                for due_s in arrivals:
                    duration_s = self._limit.duration_s
                    if duration_s is not None and due_s >= duration_s:
                        await self._sleep_until(duration_s)
                        break
                    prompt = self._next_prompt()  # before it is due, since it takes time
                    due = self._started + due_s
                    await self._sleep_until(due_s)
                    self._late_s.append(max(0.0, time.perf_counter() - due))
                    group.create_task(self._request(prompt, due))
                    # The task has not run yet, so there is no record of it.
                    if self._limit.num_requests is not None and (
                        len(self._late_s) >= self._limit.num_requests
                    ):
                        break
            return True

        return await self._measure(run)

    async def steady(
        self, arrivals: Iterator[float], window: Window, patience_s: Callable[[int], float]
    ) -> Measured:
        """Send at the given times until the requests that are due in the window have ended.

        Args:
            arrivals: in seconds from the start, without end.
            patience_s: from a number of output tokens to the seconds after which a measured request
                is given up, once the window is over.
        """
        self._window = window

        async def send(group: asyncio.TaskGroup, tasks: list[asyncio.Task[None]]) -> None:
            for due_s in arrivals:
                self._next_due_s = due_s
                prompt = self._next_prompt()
                due = self._started + due_s
                await self._sleep_until(due_s)
                self._late_s.append(max(0.0, time.perf_counter() - due))
                give_up = due + patience_s(prompt.output_len)
                request = self._request(prompt, due, give_up, window.has(due_s))
                tasks.append(group.create_task(request))

        async def run() -> bool:
            async with asyncio.TaskGroup() as group:
                tasks: list[asyncio.Task[None]] = []
                tasks.append(group.create_task(send(group, tasks)))
                await self._sleep_until(window.until_s)
                # The last ones of the window may be late.
                while self._next_due_s < window.until_s:
                    await asyncio.sleep(_POLL_S)
                await asyncio.sleep(0)  # so that each has its record
                cool_down = CoolDown(one for one in self._records if one.is_measured)
                while not cool_down.is_over(time.perf_counter()):
                    await asyncio.sleep(_POLL_S)
                for task in tasks:
                    task.cancel()
            for record in self._records:
                if record.is_measured and record.error == UNFINISHED:
                    record.error = GIVEN_UP
                    self._examples[GIVEN_UP] = GIVEN_UP_TEXT
            return True

        return await self._measure(run)

    async def _sleep_until(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, self._started + seconds - time.perf_counter()))

    def _may_send(self) -> bool:
        limit = self._limit
        if limit.num_requests is not None and len(self._records) >= limit.num_requests:
            return False
        elapsed = time.perf_counter() - self._started
        return limit.duration_s is None or elapsed < limit.duration_s

    async def _measure(self, run: Callable[[], Coroutine[Any, Any, bool]]) -> Measured:
        async with LagMeter() as lag:
            self._started = time.perf_counter()
            cpu = time.process_time()
            is_complete = await unless_stopped(self._stop, run())
            ended = time.perf_counter()
            cpu_s = time.process_time() - cpu
        elapsed_s = ended - self._started
        window_s = elapsed_s
        if self._window is not None:
            window_s = self._window.length_s
        elif self._limit.duration_s is not None:
            window_s = min(elapsed_s, self._limit.duration_s)
        return Measured(
            self._records,
            self._started,
            window_s,
            self._late_s,
            lag.samples_s,
            cpu_s,
            elapsed_s,
            self._examples,
            is_interrupted=is_complete is None,
            window=self._window,
        )

    async def _request(
        self,
        prompt: Prompt,
        due: float | None = None,
        give_up: float = math.inf,
        is_measured: bool = True,
    ) -> None:
        record = Record(
            sent=time.perf_counter(),
            error=UNFINISHED,
            due=due,
            give_up=give_up,
            is_measured=is_measured,
        )
        self._records.append(record)
        try:
            async with aclosing(self._target.send(prompt)) as arrivals:
                async for arrival in arrivals:
                    if arrival.num_tokens:
                        record.arrivals.append((arrival.at, arrival.num_tokens))
                        self._num_tokens += arrival.num_tokens
                    record.num_input_tokens = arrival.num_input_tokens or record.num_input_tokens
                    record.num_output_tokens = arrival.num_output_tokens or record.num_output_tokens
            record.error = ""
        except ClientError as error:
            record.error = type(error).__name__
            self._examples.setdefault(record.error, str(error))
        finally:
            record.ended = time.perf_counter()
            self._num_ended += 1
