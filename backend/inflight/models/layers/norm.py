"""Weights of a norm, on any device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class NormWeights:
    """Of one norm, in float32.

    Attributes:
        weight: multiplies the normed values.
        bias: is added to them; None for zero.
    """

    weight: Tensor
    bias: Tensor | None = None
