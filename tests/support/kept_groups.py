"""Linear layers that stay in codes with scales of groups on a CPU give nearly the same numbers."""

from __future__ import annotations

from typing import Any

import torch

import family
from inflight.checkpoint.locate import Checkpoint
from inflight.config import Quantization

KEPT_TOLERANCE = 6e-2
"""Of logits, as `family.relative_rms`: kernels keep fewer bits of scales, and of activations, than
there are in float32."""


def check(checkpoint: Checkpoint, model: Any, quantization: Quantization = "auto") -> None:
    """Our logits are those of transformers, exactly so with dequantised weights."""
    family.check(checkpoint, model, quantization="none")
    texts = [family.tokens(seed=1), family.tokens(seed=2)]
    found = family.our_logits(checkpoint, texts, family.MIXED, quantization=quantization)
    expected = [family.reference_logits(model, text) for text in texts]
    assert family.relative_rms(torch.cat(found), torch.cat(expected)) < KEPT_TOLERANCE
