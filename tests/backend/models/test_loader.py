"""Weights arrive in one canonical form, whatever the format and the family."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

import tiny
from inflight.models import registry
from inflight.models.loader import CpuPlacement, load_weights
from inflight.models.registry import family_of, read_spec
from paged_decoder import Paged, blocks_for, load

PROMPT = [5, 17, 99, 3, 150, 42]


@pytest.fixture
def zero_centered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama, as if its checkpoints stored the weights of norms minus one."""
    family = dataclasses.replace(
        registry.all_families()["llama"], zero_centered_norms=("huggingface",)
    )
    monkeypatch.setitem(registry.all_families(), "llama", family)


def norms_of(weights: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in weights if name.endswith("norm.weight")]


def test_norms_are_float32_and_other_weights_are_not(tmp_path: Path) -> None:
    checkpoint = tiny.write_llama(tmp_path)
    weights = load_weights(
        checkpoint, read_spec(checkpoint), CpuPlacement(torch.bfloat16), lambda *_: None
    )
    layer = weights.layers[0]
    assert layer.attention_norm is not None and layer.mlp_norm is not None
    norms = (weights.norm, layer.attention_norm, layer.mlp_norm)
    assert {norm.weight.dtype for norm in norms} == {torch.float32}
    product = layer.qkv(torch.zeros(1, 64, dtype=torch.bfloat16))
    assert weights.embedding.dtype == product.dtype == torch.bfloat16


@pytest.mark.usefixtures("zero_centered")
def test_one_is_added_in_float32(tmp_path: Path) -> None:
    """bfloat16 has no 1 + 2**-10."""
    stored = tiny.random_weights(tiny.SETTINGS)
    for name in norms_of(stored):
        stored[name] = torch.full_like(stored[name], 2.0**-10)
    checkpoint = tiny.write_llama(tmp_path, stored, dtype=torch.bfloat16)
    spec = read_spec(checkpoint)
    assert family_of(spec).zero_centered_norms
    weights = load_weights(checkpoint, spec, CpuPlacement(torch.bfloat16), lambda *_: None)
    found = [weights.norm]
    for layer in weights.layers:
        found += [norm for norm in (layer.attention_norm, layer.mlp_norm) if norm is not None]
    assert len(found) == len(norms_of(stored))
    for norm in found:
        assert torch.equal(norm.weight, torch.full_like(norm.weight, 1 + 2.0**-10))


def test_logits_are_those_of_weights_that_are_stored_whole(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    whole = tiny.random_weights(tiny.SETTINGS)
    names = norms_of(whole)
    assert len(names) == 1 + 2 * tiny.SETTINGS["num_hidden_layers"]
    centered = whole | {name: whole[name] - 1 for name in names}
    step = (PROMPT, 0, len(PROMPT), blocks_for(len(PROMPT)))
    (expected,) = Paged(load(tiny.write_llama(tmp_path / "whole", whole))).run(step)
    request.getfixturevalue("zero_centered")
    (logits,) = Paged(load(tiny.write_llama(tmp_path / "centered", centered))).run(step)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
