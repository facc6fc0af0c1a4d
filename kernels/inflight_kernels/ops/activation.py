"""Activations of an MLP. Shapes: n rows of `width` values."""

from __future__ import annotations

from torch import Tensor

from inflight_kernels.runtime.compile import Instantiation
from inflight_kernels.runtime.launch import STORAGE_TYPES, check, kernel, name_of, vectors_in

_THREADS = 256


def silu_mul(x: Tensor, *, out: Tensor, pdl: bool = False) -> None:
    """SwiGLU (arXiv:2002.05202): silu(gate) * up -> out.

    Args:
        x: [n, 2 * width] = gate | up.
        out: [n, width].
        pdl: see `Kernel`.

    Raises:
        ValueError: wrong shape or type of an operand.
    """
    _activate("silu_mul", x, out, pdl, gated=True)


def gelu_tanh_mul(x: Tensor, *, out: Tensor, pdl: bool = False) -> None:
    """GeGLU's gate (arXiv:2002.05202) with the tanh approximation of GELU (arXiv:1606.08415), which
    the Gemma families use: gelu_tanh(gate) * up -> out.

    Args:
        x: [n, 2 * width] = gate | up.
        out: [n, width].
        pdl: see `Kernel`.

    Raises:
        ValueError: wrong shape or type of an operand.
    """
    _activate("gelu_tanh_mul", x, out, pdl, gated=True)


def gelu_tanh(x: Tensor, *, out: Tensor, pdl: bool = False) -> None:
    """GELU (arXiv:1606.08415) in its tanh approximation -> out.

    Args:
        x: [n, width].
        out: [n, width]; may be x.
        pdl: see `Kernel`.

    Raises:
        ValueError: wrong shape or type of an operand.
    """
    _activate("gelu_tanh", x, out, pdl)


def relu2(x: Tensor, *, out: Tensor, pdl: bool = False) -> None:
    """Squared ReLU (arXiv:2109.08668) -> out.

    Args:
        x: [n, width].
        out: [n, width]; may be x.
        pdl: see `Kernel`.

    Raises:
        ValueError: wrong shape or type of an operand.
    """
    _activate("relu2", x, out, pdl)


def _activate(name: str, x: Tensor, out: Tensor, pdl: bool, *, gated: bool = False) -> None:
    storage = name_of(STORAGE_TYPES, "x", x)
    num_rows, width = out.shape
    check("x", x, (num_rows, 2 * width if gated else width), x.dtype)
    check("out", out, (num_rows, width), x.dtype)
    vectors = vectors_in("width", width, x.dtype)
    total = num_rows * vectors
    if total >= 2**31:
        raise ValueError(f"out has {total} vectors of 16 bytes; at most 2**31 - 1 in a launch")
    if total:
        row = (vectors,) if gated else ()
        kernel("activation", f"{name}<{storage}>")(
            -(-total // _THREADS), _THREADS, x, out, total, *row, pdl=pdl
        )


def instantiations() -> list[Instantiation]:
    """All kernels of this module."""
    names = (
        f"{name}<{storage}>"
        for name in ("silu_mul", "gelu_tanh_mul", "gelu_tanh", "relu2")
        for storage in STORAGE_TYPES.values()
    )
    return [("activation", tuple(names), ())]
