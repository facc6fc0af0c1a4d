"""The server's own metrics tell what its supervisor saw."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from inflight.deploy.server_families import SERVER_FAMILIES
from inflight.errors import EngineError
from inflight.ipc.gpu.power import PowerMeter, Reading
from inflight.ipc.health import Health
from inflight.ipc.metrics.request_counts import RequestCounts
from inflight.supervision.host_memory import HostMemory
from inflight.supervision.server_metrics import ServerMetrics
from metric_snapshots import empty, with_values

READY = Health(is_live=True, is_ready=True)
BROKEN = Health(is_live=True, is_ready=False, reason="tritonserver was killed")


class FakeEngine:
    """An engine whose client answers with a snapshot, or not at all."""

    def __init__(self, folder: Path, name: str) -> None:
        self.model = folder / name
        (self.model / "1").mkdir(parents=True)
        (self.model / "1" / "engine.json").touch()
        self.num_tokens = 0
        self.has_exited = False
        self.client: Any = SimpleNamespace(
            welcome=SimpleNamespace(model_name="small", device="CPU"), metrics=self._metrics
        )

    def _metrics(self) -> Any:
        if self.has_exited:
            raise EngineError("the engine has exited")
        return with_values(empty(), generation_tokens=self.num_tokens, engine_up=1)


class FakeGpu:
    """Its power is 100 W, and 50 W while it idles."""

    uuid, name = "GPU-1", "NVIDIA X"

    def __init__(self) -> None:
        self.watts = 50.0

    def read(self) -> Reading:
        return Reading(self.watts, None)


class Watched:
    """Metrics on a clock of their own."""

    def __init__(self, folder: Path) -> None:
        self.now = 100.0
        self.folder = folder
        self.engines = [FakeEngine(folder, name) for name in ("a", "b")]
        names = ["tritonserver", "the engine of a", "the HTTP door"]
        self.keepers = [
            SimpleNamespace(child=SimpleNamespace(name=name), num_restarts=0) for name in names
        ]
        keepers: Any = self.keepers
        engines: Any = self.engines
        self.gpu = FakeGpu()
        self.meter = PowerMeter(self.gpu, lambda: self.now)
        self.memory = HostMemory(0)
        self.metrics = ServerMetrics(
            lambda: keepers,
            lambda: engines,
            folder,
            frozenset(),
            self.memory,
            self.meter,
            lambda: self.now,
        )

    def observe(self, health: Health, seconds: float) -> None:
        """For so long, looking every tenth of a second."""
        for _ in range(round(seconds * 10)):
            self.metrics.observe(health)
            self.now += 0.1

    def shown(self) -> dict[tuple[str, tuple[str, ...]], float]:
        """Values by name and label values; LABELS other than `model` left out."""
        return {
            (
                sample.name,
                tuple(
                    value
                    for label, value in sorted(sample.labels.items())
                    if label not in ("model_name", "engine", "version")
                ),
            ): sample.value
            for family in text_string_to_metric_families(self.metrics.render().decode())
            for sample in family.samples
        }


@pytest.fixture
def watched(tmp_path: Path) -> Any:
    found = Watched(tmp_path)
    yield found
    found.metrics.close()


def test_all_families_are_shown(watched: Watched) -> None:
    watched.engines[0].client.welcome.device = "GPU"
    watched.meter.read()
    watched.memory.available_bytes = 1
    watched.shown()
    watched.engines[0].num_tokens = 5
    RequestCounts(watched.folder / "http.requests").count(200)
    names = {name for name, _ in watched.shown()}
    expected = {family.name for family in SERVER_FAMILIES}
    assert expected <= names
    assert "inflight_generation_tokens_total" in names


def test_readiness_is_that_of_the_supervisor(watched: Watched) -> None:
    assert watched.shown()["inflight_server_ready", ()] == 0
    watched.observe(READY, 1)
    shown = watched.shown()
    assert (shown["inflight_server_ready", ()], shown["inflight_server_live", ()]) == (1, 1)
    watched.observe(BROKEN, 1)
    shown = watched.shown()
    assert (shown["inflight_server_ready", ()], shown["inflight_server_live", ()]) == (0, 1)


def test_time_not_ready_counts_from_the_first_readiness(watched: Watched) -> None:
    watched.observe(BROKEN, 30)  # it loads
    watched.observe(READY, 10)
    assert watched.shown()["inflight_server_not_ready_seconds_total", ()] == 0
    watched.observe(BROKEN, 2.5)
    watched.observe(READY, 10)
    watched.observe(BROKEN, 1.5)
    watched.observe(READY, 10)
    shown = watched.shown()["inflight_server_not_ready_seconds_total", ()]
    assert shown == pytest.approx(4.0)


def test_restarts_are_those_of_the_keepers(watched: Watched) -> None:
    watched.keepers[1].num_restarts = 3
    shown = watched.shown()
    assert shown["inflight_process_restarts_total", ("engine of a",)] == 3
    assert shown["inflight_process_restarts_total", ("tritonserver",)] == 0
    assert shown["inflight_process_restarts_total", ("HTTP door",)] == 0


def test_requests_are_counted_by_door_and_status(watched: Watched) -> None:
    RequestCounts(watched.folder / "http.requests").count(503)
    RequestCounts(watched.folder / "grpc.1.requests").count(0)
    shown = watched.shown()
    assert shown["inflight_door_requests_total", ("http", "503")] == 1
    assert shown["inflight_door_requests_total", ("grpc", "OK")] == 1


def test_a_model_without_its_engine_keeps_its_counters(watched: Watched) -> None:
    watched.engines[0].num_tokens = 7
    watched.engines[1].num_tokens = 9
    watched.shown()
    watched.engines[0].has_exited = True
    shown = watched.shown()
    assert shown["inflight_generation_tokens_total", ("a",)] == 7
    assert shown["inflight_generation_tokens_total", ("b",)] == 9
    assert (shown["inflight_engine_up", ("a",)], shown["inflight_engine_up", ("b",)]) == (0, 1)


def test_without_an_engine_on_a_gpu_its_power_is_not_ours(watched: Watched) -> None:
    watched.meter.read()
    assert not [name for name, _ in watched.shown() if name.startswith("inflight_gpu")]


def test_energy_per_token_is_that_of_the_last_minute(watched: Watched) -> None:
    watched.engines[0].client.welcome.device = "GPU"
    of_gpu = ("NVIDIA X", "GPU-1")

    def pass_time(seconds: int, tokens: int) -> dict[tuple[str, tuple[str, ...]], float]:
        for _ in range(seconds):
            watched.now += 1.0
            watched.meter.read()
        watched.engines[0].num_tokens += tokens
        return watched.shown()

    watched.meter.read()
    shown = watched.shown()
    assert shown["inflight_gpu_power_watts", of_gpu] == 50.0
    assert ("inflight_gpu_joules_per_token", of_gpu) not in shown
    watched.gpu.watts = 100.0
    watched.meter.read()
    shown = pass_time(10, 200)
    assert shown["inflight_gpu_energy_joules_total", of_gpu] == pytest.approx(1000.0)
    assert shown["inflight_gpu_joules_per_token", of_gpu] == pytest.approx(5.0)
    pass_time(70, 0)
    shown = pass_time(10, 100)
    assert shown["inflight_gpu_energy_joules_total", of_gpu] == pytest.approx(9000.0)
    assert shown["inflight_gpu_joules_per_token", of_gpu] == pytest.approx(10.0)


def test_available_host_memory_is_shown_once_it_is_known(watched: Watched) -> None:
    assert ("inflight_host_memory_available_bytes", ()) not in watched.shown()
    watched.memory.available_bytes = 5 << 30
    assert watched.shown()["inflight_host_memory_available_bytes", ()] == 5 << 30
