"""The kernels that a GPU runner launches, without a GPU.

Within `recording` a `CudaRunner` has its memory on torch's meta device, where tensors have shapes
but no values, and launches are recorded. So models of any size can be started.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import host_kernels
from inflight.execution import cuda_runner, step_timing
from inflight.execution.drafters import device_passes
from inflight.models import decoder_cuda
from inflight.models.layers import attention as attention_layers
from inflight.models.linear import grouped_cuda, scaled_cuda, unquantized_cuda
from inflight_kernels.ops.attention import operands
from inflight_kernels.ops.latent import products as latent_products
from inflight_kernels.ops.linear import (
    few_gemm,
    gemm,
    grouped,
    grouped_gemm,
    skinny_gemm,
    weight_only,
)
from inflight_kernels.ops.moe import few, few_sizes, products
from inflight_kernels.runtime.recording import Launched, record_launches

_META = torch.device("meta")
_MEMORY = 139 << 30  # bytes, of an H200


@contextmanager
def recording(
    monkeypatch: pytest.MonkeyPatch,
    *,
    hopper: bool = True,
    num_multiprocessors: int = 132,
    shared_kib: int = 228,
) -> Iterator[Launched]:
    """Record the launches of an absent GPU.

    Args:
        hopper: whether it is one.
        num_multiprocessors: that it has.
        shared_kib: shared memory of each of them.
    """
    gpu = {
        "is_hopper": lambda: hopper,
        "num_multiprocessors": lambda: num_multiprocessors,
        "_shared_bytes": lambda: shared_kib << 10,
    }
    modules = (
        *(attention_layers, operands, decoder_cuda, scaled_cuda, unquantized_cuda),
        *(grouped_cuda, grouped, grouped_gemm),
        *(gemm, latent_products, few_gemm, skinny_gemm, weight_only, products, few, few_sizes),
    )
    for module in modules:
        for name, place in gpu.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, place)
    meta_torch = _MetaTorch()
    for owner in (cuda_runner, device_passes):
        monkeypatch.setattr(owner, "torch", meta_torch)
        monkeypatch.setattr(owner, "capture_graph", host_kernels.Recorded)
    monkeypatch.setattr(cuda_runner, "OnStream", host_kernels.HostStream)
    monkeypatch.setattr(step_timing, "torch", meta_torch)
    with record_launches() as launched:
        yield launched


class _MetaTorch(host_kernels.HostTorch):
    """torch, whose only device is the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.cuda = _MetaCuda()

    def device(self, *names: object) -> torch.device:
        return _META


class _MetaCuda(host_kernels.HostCuda):
    def mem_get_info(self, device: object) -> tuple[int, int]:
        return _MEMORY, _MEMORY
