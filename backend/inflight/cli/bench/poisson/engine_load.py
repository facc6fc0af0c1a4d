"""Runs one open loop on an engine in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import numpy as np

from inflight.cli.bench.poisson.sender import OpenLoop, Sender
from inflight.cli.bench.serving.load import GIVEN_UP_TEXT, Progress
from inflight.cli.bench.serving.results.measured import Measured
from inflight.cli.bench.serving.results.records import GIVEN_UP, UNFINISHED, Record
from inflight.cli.bench.serving.results.window import CoolDown, Window
from inflight.cli.bench.serving.workload.lengths import Shape
from inflight.core.request import Request, TokenEvent
from inflight.engine.engine import Engine, generate
from inflight.errors import InflightError
from inflight.sampling.params import SamplingParams

# At most so long between two looks at the clock while the engine has nothing to do.
_IDLE_S = 0.05
_REFRESH_S = 0.25


class EngineLoad:
    """Runs open loops on an engine, one at a time: random token ids, greedy, EOS ignored."""

    def __init__(self, engine: Engine, seed: int = 0) -> None:
        self._engine = engine
        self._next_id = 1
        self._random = np.random.default_rng(seed)
        self._records: list[Record] = []
        self._open: dict[int, Record] = {}
        self._num_tokens = 0
        self._examples: dict[str, str] = {}

    def burst(self, shapes: Iterable[Shape]) -> float:
        """Run requests that arrive at once; returns requests per second until the last one ends.

        Raises:
            InflightError: a request failed.
        """
        requests = [self._request(shape) for shape in shapes]
        started = time.perf_counter()
        generate(self._engine, requests)
        return len(requests) / (time.perf_counter() - started)

    def run(
        self, loop: OpenLoop, on_progress: Callable[[Progress], None] = lambda progress: None
    ) -> Measured:
        """Send until the requests of the window have ended or are given up; cancels the others.

        Args:
            on_progress: called several times a second, between steps.

        Raises:
            ConfigError: the lengths do not fit the model's context.
        """
        self._records, self._examples, self._num_tokens = [], {}, 0
        cpu = time.process_time()
        with Sender(loop, self._request) as sender:
            self._run(sender, loop.window, on_progress)
            ended = time.perf_counter()
        found = Measured(
            records=self._records,
            started=sender.started,
            window_s=loop.window.length_s,
            late_s=sender.late_s,
            lags_s=[],
            cpu_s=time.process_time() - cpu,
            elapsed_s=ended - sender.started,
            examples=self._examples,
            is_interrupted=False,
            window=loop.window,
        )
        self._give_up(found, ended)
        return found

    def _run(self, sender: Sender, window: Window, on_progress: Callable[[Progress], None]) -> None:
        engine, cool_down = self._engine, None
        refreshed = sender.started
        while True:
            # Before those sent until now are taken, so that none of the window is missing then.
            has_all = sender.next_due_s >= window.until_s
            for record, request in sender.take():
                self._submit(record, request)
            if engine.has_work:
                self._note(engine.step())
            else:
                sender.wait(_IDLE_S)
            now = time.perf_counter()
            if now - refreshed >= _REFRESH_S:
                refreshed = now
                elapsed_s = now - sender.started
                sent = Progress(sender.num_sent, len(self._open), self._num_tokens, elapsed_s)
                on_progress(sent)
            if now - sender.started < window.until_s:
                continue
            if cool_down is None and has_all:
                # Arrivals go on, so that the last measured requests do not run alone.
                cool_down = CoolDown(one for one in self._records if one.is_measured)
            if cool_down is not None and cool_down.is_over(now):
                return

    def _submit(self, record: Record, request: Request) -> None:
        self._records.append(record)
        try:
            self._engine.submit(request)
            self._open[request.request_id] = record
        except InflightError as error:
            record.ended = time.perf_counter()
            record.error = error.kind
            self._examples.setdefault(error.kind, str(error))

    def _note(self, events: list[TokenEvent]) -> None:
        now = time.perf_counter()
        for event in events:
            record = self._open.get(event.request_id)
            if record is None:
                continue
            if event.token_ids:
                record.arrivals.append((now, len(event.token_ids)))
                self._num_tokens += len(event.token_ids)
            if event.is_last:
                del self._open[event.request_id]
                record.ended = now
                record.error = event.error_kind or ""
                if event.error is not None:
                    self._examples.setdefault(record.error, event.error)

    def _give_up(self, measured: Measured, now: float) -> None:
        """Cancel what has not ended, and leave the engine empty."""
        for request_id, record in self._open.items():
            self._engine.cancel(request_id)
            record.ended = now
        self._open.clear()
        while self._engine.has_work:
            self._engine.step()
        for record in measured.chosen():
            if record.error == UNFINISHED:
                record.error = GIVEN_UP
                self._examples[GIVEN_UP] = GIVEN_UP_TEXT

    def _request(self, shape: Shape) -> Request:
        prompt = self._random.integers(self._engine.runner.vocab_size, size=shape.input_len)
        params = SamplingParams(max_tokens=shape.output_len, temperature=0.0, ignore_eos=True)
        self._next_id += 1
        return Request(self._next_id, prompt.tolist(), params)
