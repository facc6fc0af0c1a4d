"""Linear layers that stay in codes with scales of groups on a CPU give nearly the same numbers."""

from __future__ import annotations

from typing import Any

import torch

import family
import grouped_folders
from inflight.checkpoint.locate import Checkpoint
from inflight.config import Quantization
from inflight.models.loader import linear_names
from inflight.models.quantization.grouped import GroupedMatrix
from inflight.models.registry import read_spec

KEPT_TOLERANCE = 6e-2
"""Of logits, as `family.relative_rms`: kernels keep fewer bits of scales, and of activations, than
there are in float32."""


def check(checkpoint: Checkpoint, model: Any, quantization: Quantization = "auto") -> None:
    """Our logits are those of transformers, exactly so with dequantised weights."""
    family.check(checkpoint, model, quantization="none")
    if checkpoint.format == "huggingface":
        _check_shaped(checkpoint)
    texts = [family.tokens(seed=1), family.tokens(seed=2)]
    found = family.our_logits(checkpoint, texts, family.MIXED, quantization=quantization)
    expected = [family.reference_logits(model, text) for text in texts]
    assert family.relative_rms(torch.cat(found), torch.cat(expected)) < KEPT_TOLERANCE


def _check_shaped(checkpoint: Checkpoint) -> None:
    """Without reading them, matrices are known to be in the same groups; not in which order their
    columns are."""
    weights = grouped_folders.opened(checkpoint.path)
    without_memory = grouped_folders.opened(checkpoint.path, "meta")
    for name in linear_names(read_spec(checkpoint)):
        found, shaped = weights.read_matrix(name), without_memory.read_matrix(name)
        if isinstance(found, GroupedMatrix):
            assert isinstance(shaped, GroupedMatrix) and shaped.codes.is_meta, name
            assert shaped.shape == found.shape
            for one in ("bits", "group", "zero"):
                assert getattr(shaped, one) == getattr(found, one), (name, one)
            for part in ("minimums", "levels"):
                assert (getattr(shaped, part) is None) == (getattr(found, part) is None), name
