"""Power and energy of a GPU, from a fake of NVML."""

from __future__ import annotations

import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from inflight.ipc.gpu import power
from inflight.ipc.gpu.power import PowerMeter, Reading


class NVMLError(Exception):
    pass


class FakeNvml(ModuleType):
    """The module pynvml with two GPUs; power in mW and energy in mJ by index."""

    NVMLError = NVMLError

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.power = {0: 300_000, 1: 70_000}
        self.energy: dict[int, int] = {0: 5_000_000, 1: 1_000_000}
        self.has_driver = True

    def nvmlInit(self) -> None:
        if not self.has_driver:
            raise NVMLError("driver not loaded")

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index not in self.power:
            raise NVMLError("invalid argument")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return self.nvmlDeviceGetHandleByIndex(int(uuid.removeprefix("GPU-") or -1))

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA X"

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        if handle not in self.power:
            raise NVMLError("GPU is lost")
        return self.power[handle]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        if handle not in self.energy:
            raise NVMLError("not supported")
        return self.energy[handle]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    found = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", found)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return found


def find() -> Any:
    found = power.find_gpu()
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("visible", "uuid"), [(None, "GPU-0"), ("1", "GPU-1"), ("1,0", "GPU-1"), ("GPU-1", "GPU-1")]
)
def test_the_gpu_is_the_first_that_cuda_shows(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, visible: str | None, uuid: str
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert find().uuid == uuid


@pytest.mark.parametrize("visible", ["", "-1", "7"])
def test_without_a_visible_gpu_there_is_none(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert power.find_gpu() is None


def test_without_a_driver_or_the_package_there_is_none(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.has_driver = False
    assert power.find_gpu() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert power.find_gpu() is None


def test_units_are_watts_and_joules(nvml: FakeNvml) -> None:
    assert find().read() == Reading(300.0, 5000.0)
    del nvml.energy[0]
    assert find().read() == Reading(300.0, None)


def test_energy_is_that_of_the_counter_since_the_start(nvml: FakeNvml) -> None:
    clock = SimpleNamespace(now=100.0)
    meter = PowerMeter(find(), lambda: clock.now)
    meter.read()
    assert (meter.watts(), meter.joules) == (300.0, 0.0)
    for added in (250_000, 350_000):
        nvml.energy[0] += added
        clock.now += 1.0
        meter.read()
    assert meter.joules == pytest.approx(600.0)


def test_without_a_counter_energy_is_the_integral_of_the_power(nvml: FakeNvml) -> None:
    clock = SimpleNamespace(now=100.0)
    del nvml.energy[0]
    meter = PowerMeter(find(), lambda: clock.now)
    for watts in (100, 300, 300):
        nvml.power[0] = watts * 1000
        meter.read()
        clock.now += 2.0
    assert meter.joules == pytest.approx(2 * 200.0 + 2 * 300.0)


def test_a_counter_that_was_reset_adds_nothing_negative(nvml: FakeNvml) -> None:
    clock = SimpleNamespace(now=100.0)
    meter = PowerMeter(find(), lambda: clock.now)
    meter.read()
    nvml.energy[0] = 0
    clock.now += 1.0
    meter.read()
    assert meter.joules == pytest.approx(300.0)


def test_a_gpu_that_is_lost_has_no_power(nvml: FakeNvml) -> None:
    meter = PowerMeter(find())
    meter.read()
    del nvml.power[0]
    meter.read()
    assert meter.watts() is None and meter.joules == 0.0


def test_the_meter_reads_by_itself(nvml: FakeNvml) -> None:
    meter = PowerMeter(find(), interval_s=0.01)
    meter.start()
    deadline = time.monotonic() + 60
    while meter.watts() != 42.0 and time.monotonic() < deadline:
        nvml.power[0] = 42_000
    meter.close()
    assert meter.watts() == 42.0
