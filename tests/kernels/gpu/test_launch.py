"""Launches in graphs, in other threads, on other streams, and overlapping ones."""

from __future__ import annotations

import threading

import pytest
import torch
from cuda.bindings import driver

from inflight_kernels.ops.activation import silu_mul
from inflight_kernels.ops.norm import rms_norm
from inflight_kernels.runtime.launch import kernel

pytestmark = pytest.mark.gpu


class Chain:
    """Launches of which each reads what the one before wrote."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x
        self.weight = torch.randn(x.shape[1], device="cuda")
        self.buffers = [torch.empty_like(x), torch.empty_like(x), x.new_empty(2, *x.shape)]
        torch.cuda.synchronize()  # weights are read before the kernel ahead has ended

    def run(self, pdl: bool) -> list[torch.Tensor]:
        a, b, wide = self.buffers
        rms_norm(self.x, self.weight, 1e-5, out=a, pdl=pdl)
        for _ in range(20):
            rms_norm(a, self.weight, 1e-5, self.x, out=b, total=wide[0], pdl=pdl)
            rms_norm(b, self.weight, 1e-5, wide[0], out=a, total=wide[1], pdl=pdl)
            silu_mul(wide.view(-1, 2 * self.x.shape[1]), out=b, pdl=pdl)
            rms_norm(b, self.weight, 1e-5, out=a, pdl=pdl)
        return [buffer.clone() for buffer in self.buffers]


@pytest.mark.parametrize("rows", [1, 64, 3000])
def test_dependent_launches_give_the_same_results_as_plain_ones(rows: int) -> None:
    chain = Chain(torch.randn(rows, 2048, device="cuda").bfloat16())
    plain = chain.run(pdl=False)
    for _ in range(5):
        for buffer in chain.buffers:
            buffer.fill_(torch.nan)
        overlapping = chain.run(pdl=True)
        assert all(torch.equal(a, b) for a, b in zip(plain, overlapping, strict=True))


@pytest.mark.parametrize("pdl", [False, True])
def test_a_captured_launch_replays_with_new_values(pdl: bool) -> None:
    chain = Chain(torch.randn(64, 2048, device="cuda").bfloat16())
    chain.run(pdl)  # compiles and loads, which a capture may not
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain.run(pdl)
    chain.x.copy_(torch.randn_like(chain.x))
    graph.replay()
    replayed = [buffer.clone() for buffer in captured]
    expected = chain.run(pdl=False)
    assert all(torch.equal(a, b) for a, b in zip(replayed, expected, strict=True))


def test_a_launch_goes_to_the_current_stream() -> None:
    """The side stream sleeps first, so a launch on any other one would read the old values."""
    x = torch.zeros(4, 512, device="cuda")
    out = torch.full((4, 256), torch.nan, device="cuda")
    silu_mul(x, out=out)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # nothing public keeps a stream busy for so long
        x.fill_(1.0)
        silu_mul(x, out=out)
    side.synchronize()
    assert torch.allclose(out, torch.sigmoid(torch.ones_like(out)))


def test_a_thread_that_never_called_cuda_can_launch() -> None:
    x = torch.ones(4, 512, device="cuda")
    out = torch.full((4, 256), torch.nan, device="cuda")
    kernel.cache_clear()
    thread = threading.Thread(target=silu_mul, args=(x,), kwargs={"out": out})
    thread.start()
    thread.join()
    assert torch.allclose(out, torch.sigmoid(torch.ones_like(out)))


def test_too_much_shared_memory_is_an_error_with_the_kernels_name() -> None:
    blocks = torch.zeros(1, dtype=torch.int64, device="cuda")
    with pytest.raises(ValueError, match=r"copy_blocks.*1048576 bytes of dynamic shared"):
        kernel("cache", "copy_blocks<long long>")(1, 32, blocks, shared=1 << 20)


def test_a_kernel_that_overlaps_may_prefer_all_memory_to_be_shared() -> None:
    x = torch.ones(4, 16, device="cuda")
    out = torch.full((4, 8), torch.nan, device="cuda")
    silu = kernel("activation", "silu_mul<float>")
    carveout = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    device = driver.CUdevice(torch.cuda.current_device())
    for _ in range(2):
        silu(1, 32, x, out, 8, 2, pdl=True, max_carveout=True)
        error, percent = driver.cuKernelGetAttribute(carveout, silu._handle.handle, device)
        assert (error, percent) == (driver.CUresult.CUDA_SUCCESS, 100)
    assert torch.allclose(out, torch.sigmoid(torch.ones_like(out)))
