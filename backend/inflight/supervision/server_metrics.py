"""The metrics of a supervised server: those of all its models, and its own."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from inflight.deploy.metrics import render
from inflight.deploy.server_families import SERVER_BY_STEM
from inflight.engine.metrics.snapshot import Labels, Published, Sample
from inflight.ipc.engine_client import EngineClient
from inflight.ipc.gpu.power import PowerMeter
from inflight.ipc.health import Health
from inflight.ipc.metrics import request_counts
from inflight.ipc.metrics.mapped_counter import read_sum
from inflight.ipc.metrics.source import MetricsSource, ModelMetrics
from inflight.supervision.engines import EngineChild
from inflight.supervision.host_memory import HostMemory
from inflight.supervision.keeper import Keeper

DOORS = ("http", "grpc", "gateway")
NUM_READERS = 8
ENERGY_WINDOW_S = 60.0


class ServerMetrics:
    """What the endpoint of a server shows. It does not depend on tritonserver.

    Args:
        keepers: returns those of all children.
        engines: returns those that serve.
        folder: the server's runtime folder, where the doors count their requests.
        flavours: whose aliases of the models' metrics are shown, too.
        memory: of the host.
        meter: of the GPU; None if its power cannot be read.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        keepers: Callable[[], Sequence[Keeper]],
        engines: Callable[[], Sequence[EngineChild]],
        folder: Path,
        flavours: frozenset[str],
        memory: HostMemory,
        meter: PowerMeter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keepers = keepers
        self._engines = engines
        # By model, also while it is not loaded: its counters continue when it is loaded again.
        self._sources: dict[Path, MetricsSource] = {}
        self._folder = folder
        self._flavours = flavours
        self._memory = memory
        self._meter = meter
        self._energy: deque[tuple[float, float, float]] = deque()  # time, joules, output tokens
        self._clock = clock
        self._health: Health | None = None
        self._has_been_ready = False
        self._not_ready_s = 0.0
        self._not_ready_since: float | None = None
        self._readers = ThreadPoolExecutor(NUM_READERS, "metrics")

    def observe(self, health: Health) -> None:
        """Note the server's health; called at each assessment."""
        now = self._clock()
        self._health = health
        self._has_been_ready |= health.is_ready
        if self._not_ready_since is not None:
            self._not_ready_s += now - self._not_ready_since
        is_counted = self._has_been_ready and not health.is_ready
        self._not_ready_since = now if is_counted else None

    def render(self) -> bytes:
        """All metrics in Prometheus's text format. One thread at a time may call it."""
        # An engine in a long step answers after it: the others are read meanwhile.
        models = self._readers.map(MetricsSource.read, map(self._source, self._engines()))
        found = [one for one in models if one is not None]
        return render(found, self._flavours, [*self._own(), *self._of_gpu(found)])

    def close(self) -> None:
        self._readers.shutdown(wait=False, cancel_futures=True)

    def _source(self, engine: EngineChild) -> MetricsSource:
        source = self._sources.get(engine.model)
        if source is None:
            source = MetricsSource(engine.model, lambda: self._client_of(engine.model))
            self._sources[engine.model] = source
        return source

    def _client_of(self, model: Path) -> EngineClient | None:
        clients = [engine.client for engine in self._engines() if engine.model == model]
        return clients[0] if clients else None

    def _own(self) -> Iterator[Published]:
        health = self._health
        yield _published("server_ready", ({}, health is not None and health.is_ready))
        yield _published("server_live", ({}, health is not None and health.is_live))
        yield _published("server_not_ready_seconds", ({}, self._not_ready_s))
        if self._memory.available_bytes is not None:
            yield _published("host_memory_available_bytes", ({}, self._memory.available_bytes))
        restarts = [
            ({"process": one.child.name.removeprefix("the ")}, one.num_restarts)
            for one in self._keepers()
        ]
        yield _published("process_restarts", *restarts)
        requests = [
            ({"door": door, "status": status}, count)
            for door in DOORS
            for status, count in request_counts.read(self._folder, door).items()
        ]
        yield _published("door_requests", *requests)
        ignored = read_sum(self._folder, f"gateway*{request_counts.IGNORED_SUFFIX}")
        yield _published("gateway_ignored_fields", ({}, ignored))

    def _of_gpu(self, models: Sequence[ModelMetrics]) -> Iterator[Published]:
        meter = self._meter
        devices = [one.client.welcome.device for one in self._engines() if one.client is not None]
        if meter is None or not any(device.startswith("GPU") for device in devices):
            return
        labels = {"uuid": meter.gpu.uuid, "gpu_name": meter.gpu.name}
        watts, joules = meter.watts(), meter.joules
        if watts is not None:
            yield _published("gpu_power_watts", (labels, watts))
        yield _published("gpu_energy_joules", (labels, joules))
        now = self._clock()
        tokens = sum(one.metrics.value("generation_tokens") for one in models)
        while self._energy and now - self._energy[0][0] > ENERGY_WINDOW_S:
            self._energy.popleft()
        self._energy.append((now, joules, tokens))
        _, joules_before, tokens_before = self._energy[0]
        if tokens > tokens_before:
            per_token = (joules - joules_before) / (tokens - tokens_before)
            yield _published("gpu_joules_per_token", (labels, per_token))


def _published(stem: str, *values: tuple[Labels, float]) -> Published:
    family = SERVER_BY_STEM[stem]
    samples = [Sample("", labels, float(value)) for labels, value in values]
    return Published(family.name, family.kind, family.meaning, samples)
