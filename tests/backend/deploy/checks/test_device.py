"""A device that cannot be had is refused without torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from inflight.config import Device, EngineConfig
from inflight.deploy.checks import device
from inflight.errors import ConfigError


def check(
    found: Device, driver: Path = Path("/dev/null"), torch_version: str = "2.13.0+cu130"
) -> None:
    config = EngineConfig(model="m", device=found)
    device.check_device(config, driver_files=[driver], torch_version=torch_version)


@pytest.fixture(autouse=True)
def _all_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(device.VISIBLE, raising=False)


def test_a_gpu_with_its_driver_passes() -> None:
    check("cuda")


@pytest.mark.parametrize("other", ["auto", "cpu", "echo"])
def test_other_devices_need_none(other: Device) -> None:
    check(other, Path("/missing"), "2.13.0+cpu")


def test_without_a_driver_the_remedy_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no NVIDIA driver .* --gpus all"):
        check("cuda", Path("/missing"))


def test_a_build_of_torch_for_cpus_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"torch 2\.13\.0\+cpu is built for CPUs"):
        check("cuda", torch_version="2.13.0+cpu")


@pytest.mark.parametrize("value", ["", "-1"])
def test_hidden_gpus_are_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(device.VISIBLE, value)
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES hides all GPUs"):
        check("cuda")
    monkeypatch.setenv(device.VISIBLE, "0,1")
    check("cuda")
