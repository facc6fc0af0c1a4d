"""The forward pass on a GPU: what a step leaves out changes nothing of what it gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tiny
from inflight.checkpoint.locate import Checkpoint
from inflight.models.layers import attention, residual
from mixed_step import EVERY_ROW, SAMPLED, make_model, run

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True, params=[0, 2048], ids=["residual in bfloat16", "in float32"])
def _residual(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(residual, "_MAX_WIDE_HIDDEN_SIZE", request.param)


sampled_rows = pytest.mark.parametrize("sampled", SAMPLED, ids=str)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder: Path = tmp_path_factory.mktemp("model")
    return tiny.write_llama(folder, dtype=torch.bfloat16, head_dim=64)


@sampled_rows
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("num_layers", [None, 1])
@pytest.mark.parametrize("attended", ["all", "sampled rows"])
def test_the_last_layer_ends_for_the_sampled_rows_alone(
    checkpoint: Checkpoint,
    sampled: list[int],
    batch_invariant: bool,
    num_layers: int | None,
    attended: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Logits as in a step in which every row is sampled, and the same cache, bit by bit."""
    if attended == "sampled rows":
        monkeypatch.setattr(attention, "_MIN_STEP_TOKENS", 1)
        monkeypatch.setattr(attention, "_MIN_CHUNK_TOKENS", 1)
    model = make_model(checkpoint, torch.bfloat16, torch.device("cuda"), batch_invariant)
    whole, whole_cache = run(model, EVERY_ROW, num_layers)
    logits, cache = run(model, sampled, num_layers)
    assert torch.equal(cache, whole_cache)
    if batch_invariant:
        assert torch.equal(logits, whole[sampled])
    # Logits have a deviation of 3 or so; sums in another order, rounded on their way.
    torch.testing.assert_close(logits, whole[sampled], atol=0.1, rtol=0.02)


@sampled_rows
def test_features_of_the_last_layer_have_all_rows(
    checkpoint: Checkpoint, sampled: list[int]
) -> None:
    model = make_model(checkpoint, torch.bfloat16, torch.device("cuda"))
    whole, _ = run(model, EVERY_ROW)
    model.set_aux_layers((1, 2))
    run(model, EVERY_ROW)
    assert model.features is not None
    features = model.features.clone()
    model.features.zero_()
    logits, _ = run(model, sampled)
    assert torch.equal(model.features, features)
    torch.testing.assert_close(logits, whole[sampled], atol=0.1, rtol=0.02)
