"""Matrices of latents that a file has apart are read as those that it has joined."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inflight.models.quantization.matrix import Matrix
from inflight.models.stored.up_projections import JoinedUpProjections

HEADS, RANK, NOPE, VALUE = 2, 4, 3, 5
KEYS, VALUES, BOTH = (f"model.layers.7.self_attn.{part}_b_proj.weight" for part in ("k", "v", "kv"))
OTHER = "model.layers.7.self_attn.q_b_proj.weight"


class Stored:
    def __init__(self, **shapes: tuple[int, ...]) -> None:
        random = torch.Generator().manual_seed(0)
        names = {"keys": KEYS, "values": VALUES, "other": OTHER, "both": BOTH}
        self.tensors = {
            names[key]: torch.randn(shape, generator=random) for key, shape in shapes.items()
        }
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def read(self, name: str) -> Tensor:
        return self.tensors[name]

    def read_matrix(self, name: str) -> Matrix:
        return self.read(name)


def test_each_head_has_its_keys_above_its_values() -> None:
    stored = Stored(keys=(HEADS, RANK, NOPE), values=(HEADS, VALUE, RANK), other=(6, 4))
    joined = JoinedUpProjections(stored)
    assert joined.shapes == {BOTH: (HEADS * (NOPE + VALUE), RANK), OTHER: (6, 4)}
    heads = joined.read(BOTH).view(HEADS, NOPE + VALUE, RANK)
    for head, own in enumerate(heads):
        assert torch.equal(own[:NOPE], stored.tensors[KEYS][head].T)
        assert torch.equal(own[NOPE:], stored.tensors[VALUES][head])
    assert joined.read(OTHER) is joined.read_matrix(OTHER) is stored.tensors[OTHER]
    assert torch.equal(joined.read_matrix(BOTH), joined.read(BOTH))
    assert joined.shaped_matrix(BOTH).shape == joined.shapes[BOTH]


def test_what_is_joined_already_is_left() -> None:
    stored = Stored(both=(HEADS * (NOPE + VALUE), RANK))
    joined = JoinedUpProjections(stored)
    assert joined.shapes == stored.shapes
    assert joined.read(BOTH) is stored.tensors[BOTH]


@pytest.mark.parametrize(
    "shapes",
    [
        {"keys": (HEADS, RANK, NOPE)},
        {"values": (HEADS, VALUE, RANK)},
        {"keys": (HEADS, NOPE, RANK), "values": (HEADS, VALUE, RANK)},
        {"keys": (HEADS, RANK, NOPE), "values": (HEADS + 1, VALUE, RANK)},
        {"keys": (HEADS, RANK, NOPE), "values": (HEADS * VALUE, RANK)},
    ],
)
def test_what_does_not_fit_together_keeps_its_name(shapes: dict[str, tuple[int, ...]]) -> None:
    stored = Stored(**shapes)
    assert JoinedUpProjections(stored).shapes == stored.shapes
