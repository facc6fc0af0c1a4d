"""Scale and cap of logits."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight_kernels.runtime.compile import Instantiation
from inflight_kernels.runtime.launch import Int64, check, kernel

_THREADS = 256


def scale_cap(x: Tensor, scale: float, cap: float, *, pdl: bool = False) -> None:
    """cap * tanh(scale * x / cap), in place; scale * x if the cap is 0.

    Args:
        x: [n, vocab_size] float32.
        scale, cap: see above.
        pdl: see `Kernel`.

    Raises:
        ValueError: wrong shape or type of x.
    """
    num_rows, width = x.shape
    check("x", x, (num_rows, width), torch.float32)
    count = num_rows * width
    if count:
        kernel("logits", "scale_cap")(
            -(-count // (4 * _THREADS)), _THREADS, x, Int64(count), scale, cap, pdl=pdl
        )


def instantiations() -> list[Instantiation]:
    """All kernels of this module."""
    return [("logits", ("scale_cap",), ())]
