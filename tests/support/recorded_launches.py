"""Which kernels a GPU's runner launches, told without a GPU.

With `install` a `CudaRunner` has its memory on torch's meta device, where tensors have shapes and
no values, and a launch of a kernel leaves its stem and name behind. So models of any size start.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import host_kernels
from inflight.execution import cuda_runner, top_logprobs
from inflight.execution.drafters import device_passes
from inflight.models import stored_weights
from inflight_kernels import ops
from inflight_kernels.runtime import launch

Launched = dict[tuple[str, str], None]
"""Stem and name of each kernel that was launched, in the order of their first launches."""

_META = torch.device("meta")
_MEMORY = 139 << 30  # bytes, of an H200


def install(
    monkeypatch: pytest.MonkeyPatch, *, hopper: bool = True, num_multiprocessors: int = 132
) -> Launched:
    """Put records in the kernels' places.

    Args:
        hopper: whether the GPU that is not there is one.
        num_multiprocessors: that it has.
    """
    launched: Launched = {}

    def kernel(stem: str, name: str) -> Callable[..., None]:
        launched[stem, name] = None
        return lambda *operands, **settings: None

    places: dict[str, Callable[..., Any]] = {
        "kernel": kernel,
        "check_memory": lambda *operand, **settings: None,  # a device, and an address
        "_same_memory": lambda a, b: False,  # addresses, too
        "is_hopper": lambda: hopper,
        "num_multiprocessors": lambda: num_multiprocessors,
        "matrix_map": lambda *operands: 0,
        "_tensor_map": lambda cache: 0,
        "_shared_bytes": lambda: 228 << 10,
    }
    names = [module.name for module in pkgutil.iter_modules(ops.__path__)]
    modules = [importlib.import_module(f"inflight_kernels.ops.{name}") for name in names]
    monkeypatch.setattr(launch, "check_memory", places["check_memory"])
    for module in modules:
        for name, place in places.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, place)
    cuda_linear = importlib.import_module("inflight.models.quantization.unquantized")
    monkeypatch.setattr(cuda_linear, "num_multiprocessors", places["num_multiprocessors"])
    cuda_attention = importlib.import_module("inflight.models.layers.attention")
    monkeypatch.setattr(cuda_attention, "is_hopper", places["is_hopper"])
    meta_torch = _MetaTorch()
    for owner in (cuda_runner, device_passes):
        monkeypatch.setattr(owner, "torch", meta_torch)
        monkeypatch.setattr(owner, "capture_graph", host_kernels.Recorded)
    monkeypatch.setattr(top_logprobs, "torch", meta_torch)
    monkeypatch.setattr(stored_weights.RandomWeights, "read", _read)
    return launched


def _read(stored: stored_weights.RandomWeights, name: str) -> Tensor:
    return torch.empty(stored.shapes[name], device=_META)


class _MetaTorch(host_kernels.HostTorch):
    """torch, whose only device is the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.cuda = _MetaCuda()

    def device(self, *names: object) -> torch.device:
        return _META

    def zeros(self, *shape: Any, pin_memory: bool = False, **settings: Any) -> Tensor:
        # Nothing can be copied from the meta device to the host: its memory is there, too.
        return torch.zeros(*shape, **(settings | {"device": _META}))


class _MetaCuda(host_kernels.HostCuda):
    def mem_get_info(self, device: object) -> tuple[int, int]:
        return _MEMORY, _MEMORY
