"""Rotary embedding frequencies, with the scaling methods for contexts beyond the trained one."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from inflight.models.spec import RopeSpec


def inverse_frequencies(
    rope: RopeSpec, head_dim: int, max_len: int
) -> tuple[npt.NDArray[np.float32], float]:
    """Radians per position of each column pair, and the attention factor of cos and sin.

    Args:
        rope: parameters.
        head_dim: columns of a head, of which the first rope.rotary_dim are rotated.
        max_len: maximum sequence length. Scaling that depends on the length (dynamic, longrope) is
            computed for it and used for all positions, since cached keys cannot be rotated again.

    Returns:
        ([head_dim / 2] float32, attention factor). Columns that are not rotated come last, with the
        frequency 0.
    """
    if rope.type == "none":
        return np.zeros(head_dim // 2, np.float32), 1.0
    dim = rope.rotary_dim or head_dim
    frequencies, attention_factor = _rotated(rope, dim, max_len)
    return np.pad(frequencies, (0, (head_dim - dim) // 2)), attention_factor


def rope_order(rope: RopeSpec, head_dim: int, adjacent: bool) -> list[int] | None:
    """The order of a head's columns in which RoPE rotates each column i < D/2 with column i + D/2;
    None if they are in this order already. The scores do not depend on the order.

    Args:
        rope: parameters.
        head_dim: D.
        adjacent: whether the checkpoint rotates columns 2i and 2i + 1 of the rotated ones, instead
            of columns i and i + rotary_dim / 2.
    """
    dim = rope.rotary_dim or head_dim
    firsts = range(0, dim, 2) if adjacent else range(dim // 2)
    partners = range(1, dim, 2) if adjacent else range(dim // 2, dim)
    middle = (dim + head_dim) // 2
    order = [*firsts, *range(dim, middle), *partners, *range(middle, head_dim)]
    return None if order == list(range(head_dim)) else order


def _rotated(rope: RopeSpec, dim: int, max_len: int) -> tuple[npt.NDArray[np.float32], float]:
    """Frequencies [dim / 2] of the rotated columns, and the attention factor."""
    theta = rope.theta
    if rope.type == "dynamic":
        theta = _dynamic_theta(rope, dim, max_len)
    # float32 at every step, as in training.
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    frequencies = (1.0 / np.power(np.float32(theta), exponents)).astype(np.float32)
    attention_factor = 1.0
    if rope.type == "linear":
        frequencies = frequencies / np.float32(rope.factor)
    elif rope.type == "llama3":
        frequencies = _llama3(rope, frequencies)
    elif rope.type == "yarn":
        frequencies = _yarn(rope, frequencies, dim)
        attention_factor = _yarn_attention_factor(rope)
    divisors = rope.divisors
    if rope.type == "longrope":
        attention_factor = _longrope_attention_factor(rope)
        if max_len > rope.original_max_position:
            divisors = rope.long_divisors
    if divisors is not None:
        frequencies = frequencies / np.array(divisors, np.float32)
    return frequencies.astype(np.float32), attention_factor


def _dynamic_theta(rope: RopeSpec, head_dim: int, max_len: int) -> float:
    # NTK-aware scaling whose base depends on the length; none within the trained context.
    length = max(max_len, rope.original_max_position)
    stretch = rope.factor * length / rope.original_max_position - (rope.factor - 1.0)
    return float(rope.theta * stretch ** (head_dim / (head_dim - 2)))


def _llama3(rope: RopeSpec, frequencies: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    # Llama 3.1: long wavelengths scaled, short ones kept, linear interpolation between.
    wavelengths = 2 * math.pi / frequencies
    blend = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blend = np.clip(blend, 0.0, 1.0)
    return ((1 - blend) * frequencies / rope.factor + blend * frequencies).astype(np.float32)


def _yarn(
    rope: RopeSpec, frequencies: npt.NDArray[np.float32], head_dim: int
) -> npt.NDArray[np.float32]:
    # "NTK-by-parts" of YaRN (arXiv:2309.00071).
    def column(rotations: float) -> float:
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = column(rope.beta_fast), column(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low), 0.0, 1.0)
    return (frequencies / rope.factor * ramp + frequencies * (1 - ramp)).astype(np.float32)


def _yarn_attention_factor(rope: RopeSpec) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _longrope_attention_factor(rope: RopeSpec) -> float:
    # LongRoPE (arXiv:2402.13753), as in the Phi-3 family.
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1.0:
        return 1.0
    return math.sqrt(1.0 + math.log(rope.factor) / math.log(rope.original_max_position))
