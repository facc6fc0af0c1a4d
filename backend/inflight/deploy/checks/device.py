"""Whether this machine can have the device of an engine, without importing torch."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Sequence
from pathlib import Path

from inflight.config import EngineConfig
from inflight.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
# The NVIDIA driver's control device, also in containers; and that of WSL 2.
DRIVER_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
_REMEDY = 'set "device" to "auto" or "cpu"'


def check_device(
    config: EngineConfig,
    *,
    driver_files: Sequence[Path] = DRIVER_FILES,
    torch_version: str | None = None,
) -> None:
    """Check a device that is named; `auto` uses what there is.

    Args:
        config: the engine's settings.
        driver_files: one of them exists if there is a GPU with its driver.
        torch_version: None for that of the installed torch.

    Raises:
        ConfigError: the device is `cuda`, and certainly not available.
    """
    if config.device != "cuda":
        return
    if torch_version is None:
        torch_version = importlib.metadata.version("torch")
    if torch_version.endswith("+cpu"):
        raise ConfigError(
            f"device: is cuda, but torch {torch_version} is built for CPUs; install a build for "
            f"CUDA, or {_REMEDY}"
        )
    if os.environ.get(VISIBLE, "0").strip() in ("", "-1"):
        raise ConfigError(f"device: is cuda, but {VISIBLE} hides all GPUs; unset it, or {_REMEDY}")
    if not any(path.exists() for path in driver_files):
        raise ConfigError(
            "device: is cuda, but no NVIDIA driver is loaded or visible; in a container, pass the "
            f"GPU (docker run --gpus all), or {_REMEDY}"
        )
