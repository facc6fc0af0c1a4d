"""The forward pass on a GPU, with the kernels' definitions in the kernels' place: which rows of a
step are computed, and in which buffers. tests/backend/gpu says the same of the kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import host_kernels
import tiny
from inflight.checkpoint import Checkpoint
from inflight.model import cuda_attention
from inflight.model.llama_cuda import Model
from mixed_step import EVERY_ROW, NUM_TOKENS, SAMPLED, make_model, run

sampled_rows = pytest.mark.parametrize("sampled", SAMPLED, ids=str)


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    host_kernels.install(monkeypatch)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder: Path = tmp_path_factory.mktemp("model")
    return tiny.write_llama(folder, head_dim=64)


@pytest.fixture
def model(checkpoint: Checkpoint) -> Model:
    return make_model(checkpoint, torch.float32, torch.device("cpu"))


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows that each MLP was given."""
    found: list[int] = []
    inner = host_kernels.HostLinear.gated

    def counted(self: host_kernels.HostLinear, *operands: Any) -> None:
        found.append(operands[-1])
        inner(self, *operands)

    monkeypatch.setattr(host_kernels.HostLinear, "gated", counted)
    return found


@sampled_rows
@pytest.mark.parametrize("num_layers", [None, 1])
def test_the_last_layer_ends_for_the_sampled_rows_alone(
    model: Model, gated: list[int], sampled: list[int], num_layers: int | None
) -> None:
    """The numbers are those of a step in which every row is sampled, in the cache as well."""
    whole, whole_cache = run(model, EVERY_ROW, num_layers)
    gated.clear()
    logits, cache = run(model, sampled, num_layers)
    torch.testing.assert_close(logits, whole[sampled], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(cache, whole_cache, atol=1e-6, rtol=1e-6)
    last = [len(sampled)] if sampled else []
    assert gated == [NUM_TOKENS] * ((num_layers or 2) - 1) + last


def test_a_step_that_samples_nothing_has_no_attention_in_the_last_layer(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def counted(module: object, name: str) -> None:
        inner = getattr(module, name)

        def op(*operands: Any, **settings: Any) -> None:
            calls.append(name)
            inner(*operands, **settings)

        monkeypatch.setattr(module, name, op)

    counted(cuda_attention, "rope_write_kv")
    counted(cuda_attention.attention, "attend")
    run(model, [])
    assert calls == ["rope_write_kv", "attend", "rope_write_kv"]


@sampled_rows
def test_who_taps_the_last_layer_gets_all_of_its_rows(
    model: Model, gated: list[int], sampled: list[int]
) -> None:
    whole, _ = run(model, EVERY_ROW)
    model.tap((1, 2))
    gated.clear()
    logits, _ = run(model, sampled)
    torch.testing.assert_close(logits, whole[sampled], atol=1e-5, rtol=1e-5)
    assert gated == [NUM_TOKENS] * 2
    assert model.features is not None
    # Norm and head of what came after the last layer are the logits.
    after = model.features[:NUM_TOKENS, model.config.hidden_size :]
    normed = torch.nn.functional.rms_norm(after, after.shape[1:], model.weights.norm, 1e-5)
    torch.testing.assert_close(normed @ model.weights.head.t(), whole, atol=1e-5, rtol=1e-5)
