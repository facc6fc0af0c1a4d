"""Power and energy of the GPU that the engines use, read from NVML once a second."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0


class Reading(NamedTuple):
    """What a GPU reports.

    Attributes:
        watts: its power, averaged over about a second.
        joules: its energy since an arbitrary time; None if it has no such counter.
    """

    watts: float
    joules: float | None


class Gpu(Protocol):
    """A GPU with a power sensor.

    Attributes:
        uuid, name: as in nvidia-smi.
    """

    uuid: str
    name: str

    def read(self) -> Reading:
        """Raises OSError if it does not answer."""


class PowerMeter:
    """Reads a GPU's power on a thread of its own, and adds up the energy.

    Args:
        gpu: to read.
        clock: seconds, monotonic.
        interval_s: between two readings.
    """

    def __init__(
        self,
        gpu: Gpu,
        clock: Callable[[], float] = time.monotonic,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self.gpu = gpu
        self._clock = clock
        self._interval_s = interval_s
        self._last: tuple[float, Reading] | None = None
        self._joules = 0.0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-power", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing.set()

    def watts(self) -> float | None:
        """The power as last read; None if the GPU does not answer."""
        last = self._last
        return None if last is None else last[1].watts

    @property
    def joules(self) -> float:
        """Energy since the first reading."""
        return self._joules

    def read(self) -> None:
        """Read once."""
        try:
            reading = self.gpu.read()
        except OSError:
            self._last = None
            return
        now, last = self._clock(), self._last
        self._last = now, reading
        if last is not None:
            self._joules += _energy_between(*last, now, reading)

    def _run(self) -> None:
        self.read()
        while not self._closing.wait(self._interval_s):
            self.read()


def find_gpu() -> Gpu | None:
    """The first GPU that CUDA shows to this process, which the engines use; None without NVML."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
        if visible.isdecimal():
            handle = pynvml.nvmlDeviceGetHandleByIndex(int(visible))
        else:
            handle = pynvml.nvmlDeviceGetHandleByUUID(visible)
        gpu = NvmlGpu(pynvml, handle)
        gpu.read()
    except (pynvml.NVMLError, OSError) as error:
        logger.info("the power of the GPU cannot be read: %s", error)
        return None
    return gpu


class NvmlGpu:
    """A GPU as NVML shows it.

    Args:
        nvml: the module pynvml.
        handle: NVML's, of the GPU.
    """

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self.uuid = str(nvml.nvmlDeviceGetUUID(handle))
        self.name = str(nvml.nvmlDeviceGetName(handle))

    def read(self) -> Reading:
        """Raises OSError if the GPU does not answer."""
        try:
            watts = self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3
        except self._nvml.NVMLError as error:
            raise OSError(f"NVML: {error}") from None
        try:
            joules = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3
        except self._nvml.NVMLError:  # before Volta, and on some vGPUs
            joules = None
        return Reading(watts, joules)


def _energy_between(before: float, first: Reading, now: float, last: Reading) -> float:
    """Joules between two readings: by the counter if there is one that has not been reset."""
    if first.joules is not None and last.joules is not None and last.joules >= first.joules:
        return last.joules - first.joules
    return (first.watts + last.watts) / 2 * (now - before)
