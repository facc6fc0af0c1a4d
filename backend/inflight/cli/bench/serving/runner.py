"""Runs the levels of a plan, one after another."""

from __future__ import annotations

import asyncio
import gc
import random
import secrets
from collections.abc import Callable, Coroutine
from typing import Any

from inflight.cli.bench.serving.load import Limit, LoadGenerator
from inflight.cli.bench.serving.plan import RATE, Plan
from inflight.cli.bench.serving.results.figures import level as level_of
from inflight.cli.bench.serving.results.measured import Measured
from inflight.cli.bench.serving.results.report import Level
from inflight.cli.bench.serving.search import RateSearch
from inflight.cli.bench.serving.show import Refresh, Show
from inflight.cli.bench.serving.stopping import unless_stopped
from inflight.cli.bench.serving.targets.target import Prompt, Target
from inflight.cli.bench.serving.workload import prompts
from inflight.cli.bench.serving.workload.lengths import Drawn, Listed, Normal
from inflight.cli.bench.serving.workload.prompts import PromptMaker
from inflight.errors import ConfigError

FIRST_RATE = 1.0
"""Where a search for the highest rate begins unless the user says so."""
_REFRESH_S = 0.25


class Runner:
    """
    Args:
        target: measured.
        plan: what to run.
        show: shows the progress.
        stop: ends the run when set.

    Attributes:
        levels: results so far.
    """

    def __init__(self, target: Target, plan: Plan, show: Show, stop: asyncio.Event) -> None:
        self.levels: list[Level] = []
        self._target = target
        self._plan = plan
        self._show = show
        self._stop = stop
        # Lengths and arrivals follow from the seed. Words do not: the prefix cache may still have
        # the prompts of an earlier run.
        self._words = random.Random(secrets.randbits(64))
        self._maker: PromptMaker | None = None

    async def run(self) -> None:
        """
        Raises:
            ClientError: the server refuses prompts, or does not respond.
            ConfigError: prompts of the planned lengths cannot be made.
        """
        if not _has_prompts(self._plan):
            self._show.note("counting the tokens of words")
            maker = await unless_stopped(self._stop, prompts.learn(self._count))
            if maker is None:
                return
            self._maker = maker.with_prefix(self._plan.shared_prefix, self._words)
            _check_inputs(self._plan, self._maker.min_tokens)
        self._prompts("")()  # an error of the lengths is raised here, not in a task of a level
        await self._warm_up()
        if self._plan.is_search:
            await self._search()
            return
        for value in self._plan.levels:
            if self._stop.is_set():
                break
            await self._level(value)

    async def _search(self) -> None:
        search = RateSearch(self._plan.levels[0] if self._plan.levels else FIRST_RATE)
        while not self._stop.is_set() and (rate := search.next()) is not None:
            await self._level(rate)
            search.tried(rate, bool(self.levels[-1].meets_slo))

    async def _count(self, prompt: str) -> int:
        found = 0
        async for arrival in self._target.send(Prompt(prompt, 1)):
            found = arrival.num_input_tokens or found
        return found

    async def _warm_up(self) -> None:
        """Compiles what is compiled on first use, and opens connections."""
        if not self._plan.num_warmup:
            return
        limit = Limit(self._plan.num_warmup)
        generator = self._generator("warm-up", limit)
        with self._show.running("warm-up", limit) as refresh:
            done = await self._watch(generator, refresh, generator.closed(self._plan.num_warmup))
        for kind, text in done.examples.items():
            self._show.warning(f"warm-up: {kind}: {text}")

    async def _level(self, value: float) -> None:
        plan = self._plan
        name = f"{plan.kind} {value:g}"
        generator = self._generator(name, plan.limit)
        if plan.kind != RATE:
            running = generator.closed(int(value))
        elif plan.limit.ramp_s:
            running = generator.steady(plan.arrivals(value), plan.window(value), plan.patience_s)
        else:
            running = generator.open(plan.arrivals(value))
        gc.collect()
        gc.freeze()  # a collection in the middle of a level would delay it
        with self._show.running(name, plan.limit) as refresh:
            measured = await self._watch(generator, refresh, running)
        found = level_of(plan.kind, value, measured, plan.slo, plan.cost_per_hour)
        self.levels.append(found)
        self._show.level(found)

    async def _watch(
        self, generator: LoadGenerator, refresh: Refresh, running: Coroutine[Any, Any, Measured]
    ) -> Measured:
        """Show the progress while a level runs."""

        async def refreshing() -> None:
            while True:
                refresh(generator.progress())
                await asyncio.sleep(_REFRESH_S)

        task = asyncio.create_task(refreshing())
        try:
            return await running
        finally:
            task.cancel()

    def _generator(self, name: str, limit: Limit) -> LoadGenerator:
        return LoadGenerator(self._target, self._prompts(name), limit, self._stop)

    def _prompts(self, name: str) -> Callable[[], Prompt]:
        """Makes the prompts of a level; the same level has the same lengths in each run."""
        shapes = self._plan.shapes(name)

        def make() -> Prompt:
            shape = next(shapes)
            text = shape.prompt
            if not text:
                assert self._maker is not None
                text = self._maker.make(shape.input_len, self._words)
            return Prompt(text, shape.output_len)

        return make


def _check_inputs(plan: Plan, min_tokens: int) -> None:
    """
    Raises:
        ConfigError: most prompts would be longer than planned.
    """
    lengths = plan.lengths
    if not isinstance(lengths, Drawn) or not isinstance(lengths.inputs, Normal):
        return
    if lengths.inputs.mean < min_tokens:
        raise ConfigError(
            f"--input-tokens: {lengths.inputs.mean:g} tokens are too few; allowed: at least "
            f"{min_tokens}, since each prompt has special tokens or a chat template, the shared "
            "prefix, and a random word"
        )


def _has_prompts(plan: Plan) -> bool:
    """Whether a file has all prompts.

    Raises:
        ConfigError: there is also a prefix to share.
    """
    lengths = plan.lengths
    found = isinstance(lengths, Listed) and all(shape.prompt for shape in lengths.shapes)
    if found and plan.shared_prefix:
        raise ConfigError("--shared-prefix: the prompts come from the file of --lengths")
    return found
