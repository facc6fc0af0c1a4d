"""What this machine's CPU runs: kernels in C if there is a compiler for them, otherwise torch."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from inflight_kernels.cpu_ops import transformer as kernels
from inflight_kernels.runtime.host_compile import HostCompileError
from inflight_kernels.torch_ops import transformer as definitions

_LOG = logging.getLogger("inflight.engine")


@dataclass(frozen=True, slots=True)
class CpuOps:
    """The ops of a decoder of which there are two versions; see `torch_ops.transformer`.

    `rotary` may rotate in place.
    """

    rms_norm: Callable[..., tuple[Tensor, Tensor]]
    rotary: Callable[[Tensor, Tensor, Tensor], Tensor]
    write_kv: Callable[..., None]
    attend: Callable[..., Tensor]
    silu_mul: Callable[[Tensor], Tensor]


def _ops_of(module: object) -> CpuOps:
    return CpuOps(**{name: getattr(module, name) for name in CpuOps.__slots__})


@functools.cache
def has_kernels() -> bool:
    """Whether the kernels in C can be used; the reason is logged once if not."""
    try:
        kernels.prepare()
    except HostCompileError as error:
        _LOG.warning(
            "quantised weights are dequantised, and steps of few tokens are slower: %s", error
        )
        return False
    return True


def cpu_ops(dtype: torch.dtype, *, rounds_inputs: bool = False) -> CpuOps:
    """For activations of this type.

    Args:
        dtype: of them.
        rounds_inputs: whether linear layers round their inputs, so that a difference in the last
            bit can become one of a step. Queries then attend each on its own, and a prompt gets the
            same numbers in whatever parts it is computed.
    """
    if dtype != torch.float32 or not has_kernels():
        return _ops_of(definitions)
    found = _ops_of(kernels)
    if not rounds_inputs:
        return found
    return replace(found, attend=functools.partial(kernels.attend, each=True))
