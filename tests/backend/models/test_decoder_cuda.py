"""The forward pass on a GPU, with the kernels' definitions in the kernels' place: which rows of a
step are computed, and in which buffers. tests/backend/gpu has the same claims for the kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import host_kernels
import host_linear
import tiny
from inflight.checkpoint.locate import Checkpoint
from inflight.models.decoder_cuda import Decoder
from inflight.models.layers import attention, residual
from inflight_kernels.ops.attention.operands import QuantizedOut
from mixed_step import EVERY_ROW, NUM_TOKENS, SAMPLED, make_model, run

sampled_rows = pytest.mark.parametrize("sampled", SAMPLED, ids=str)


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    host_kernels.install(monkeypatch)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder: Path = tmp_path_factory.mktemp("model")
    return tiny.write_llama(folder, head_dim=64)


@pytest.fixture(params=[0, 2048], ids=["residual of the activations' type", "wide residual"])
def model(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Decoder:
    monkeypatch.setattr(residual, "_MAX_WIDE_HIDDEN_SIZE", request.param)
    return make_model(checkpoint, torch.float32, torch.device("cpu"))


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Inputs of each MLP."""
    found: list[int] = []
    inner = host_linear.HostLinear.gated

    def counted(self: host_linear.HostLinear, *operands: Any) -> Tensor:
        found.append(operands[3])
        return inner(self, *operands)

    monkeypatch.setattr(host_linear.HostLinear, "gated", counted)
    return found


@sampled_rows
@pytest.mark.parametrize("num_layers", [None, 1])
def test_the_last_layer_ends_for_the_sampled_rows_alone(
    model: Decoder, gated: list[int], sampled: list[int], num_layers: int | None
) -> None:
    """The numbers are those of a step in which every row is sampled, in the cache as well."""
    whole, whole_cache = run(model, EVERY_ROW, num_layers)
    gated.clear()
    logits, cache = run(model, sampled, num_layers)
    torch.testing.assert_close(logits, whole[sampled], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(cache, whole_cache, atol=1e-6, rtol=1e-6)
    last = [len(sampled)] if sampled else []
    assert gated == [NUM_TOKENS] * ((num_layers or 2) - 1) + last


@sampled_rows
@pytest.mark.parametrize("max_q_len", [13, 14], ids=["as long as must be", "too short"])
def test_few_sampled_rows_of_a_long_prompt_are_attended_alone(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, sampled: list[int], max_q_len: int
) -> None:
    """Those of the last layer, with the keys that each has."""
    monkeypatch.setattr(attention, "_MIN_STEP_TOKENS", NUM_TOKENS)
    monkeypatch.setattr(attention, "_MIN_CHUNK_TOKENS", max_q_len)
    monkeypatch.setattr(attention, "_MAX_LAST_ROWS", 4)
    model = make_model(checkpoint, torch.float32, torch.device("cpu"))
    whole, whole_cache = run(model, EVERY_ROW)
    counts: list[int] = []
    inner = attention.attention.attend

    def attend(q: Tensor, *operands: Any, **settings: Any) -> None:
        counts.append(len(q))
        inner(q, *operands, **settings)

    monkeypatch.setattr(attention.attention, "attend", attend)
    logits, cache = run(model, sampled)
    torch.testing.assert_close(logits, whole[sampled], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(cache, whole_cache, atol=1e-6, rtol=1e-6)
    few = len(sampled) <= 4 and max_q_len == 13
    assert counts == [NUM_TOKENS] + ([len(sampled) if few else NUM_TOKENS] if sampled else [])


# Settings of a model, rows of a step that are sampled, and in which layers its attention quantises.
QUANTIZED: dict[str, tuple[dict[str, Any], list[int], list[bool]]] = {
    "every row": ({"quantization": "fp8"}, EVERY_ROW, [True, True]),
    "last layer cut": ({"quantization": "fp8"}, [8, 22], [True, False]),
    "integers": ({"quantization": "int8"}, EVERY_ROW, [False, False]),
    "not quantised": ({"quantization": "none"}, EVERY_ROW, [False, False]),
    "batch-invariant": (
        {"quantization": "fp8", "batch_invariant": True},
        EVERY_ROW,
        [False, False],
    ),
}


@pytest.fixture
def quantized(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each attention has quantised its output."""
    found: list[bool] = []
    inner = attention.attention.attend

    def attend(*operands: Any, quantized: QuantizedOut | None = None, **settings: Any) -> None:
        found.append(quantized is not None)
        inner(*operands, quantized=quantized, **settings)

    monkeypatch.setattr(attention.attention, "attend", attend)
    return found


@pytest.mark.parametrize(("settings", "sampled", "expected"), QUANTIZED.values(), ids=QUANTIZED)
def test_attention_of_many_tokens_quantises_what_a_layer_of_e4m3_takes(
    checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    quantized: list[bool],
    settings: dict[str, Any],
    sampled: list[int],
    expected: list[bool],
) -> None:
    """All values of a row have one scale either way, and so nearly the same error."""
    cpu = torch.device("cpu")
    after, _ = run(make_model(checkpoint, torch.float32, cpu, **settings), sampled)
    assert quantized == [False, False], "there are too few tokens"
    quantized.clear()
    monkeypatch.setattr(attention, "_MIN_QUANTIZED_TOKENS", NUM_TOKENS)
    model = make_model(checkpoint, torch.float32, cpu, **settings)
    logits, _ = run(model, sampled)
    assert quantized == expected
    again, _ = run(model, sampled)
    assert torch.equal(again, logits)
    if any(expected):
        assert (logits - after).norm() < 0.1 * after.norm()
    else:
        assert torch.equal(logits, after)


@pytest.mark.parametrize("changed", ["a token too few", "no kernel"])
def test_attention_of_other_steps_is_quantised_afterwards(
    checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    quantized: list[bool],
    changed: str,
) -> None:
    """Steps that have too few tokens, or no chunks with a kernel that writes e4m3."""
    least = NUM_TOKENS + 1 if changed == "a token too few" else NUM_TOKENS
    monkeypatch.setattr(attention, "_MIN_QUANTIZED_TOKENS", least)
    if changed == "no kernel":
        monkeypatch.setattr(attention.attention, "quantizes", lambda metadata: False)
    cpu = torch.device("cpu")
    run(make_model(checkpoint, torch.float32, cpu, quantization="fp8"), EVERY_ROW)
    assert quantized == [False, False]


def test_a_step_that_samples_nothing_has_no_attention_in_the_last_layer(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def counted(module: object, name: str) -> None:
        inner = getattr(module, name)

        def op(*operands: Any, **settings: Any) -> None:
            calls.append(name)
            inner(*operands, **settings)

        monkeypatch.setattr(module, name, op)

    counted(attention, "rope_write_kv")
    counted(attention.attention, "attend")
    run(model, [])
    assert calls == ["rope_write_kv", "attend", "rope_write_kv"]


@sampled_rows
def test_features_of_the_last_layer_have_all_rows(
    model: Decoder, gated: list[int], sampled: list[int]
) -> None:
    whole, _ = run(model, EVERY_ROW)
    model.set_aux_layers((1, 2))
    gated.clear()
    logits, _ = run(model, sampled)
    torch.testing.assert_close(logits, whole[sampled], atol=1e-5, rtol=1e-5)
    assert gated == [NUM_TOKENS] * 2
    assert model.features is not None
    # Norm and head of what came after the last layer are the logits.
    after = model.features[:NUM_TOKENS, model.spec.hidden_size :]
    normed = torch.nn.functional.rms_norm(after, after.shape[1:], model.weights.norm.weight, 1e-5)
    torch.testing.assert_close(normed @ model.weights.head.weight.t(), whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("most", [64, 63], ids=["as wide as may be", "wider"])
def test_the_residual_of_a_small_model_is_in_float32(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(residual, "_MAX_WIDE_HIDDEN_SIZE", most)
    model = make_model(checkpoint, torch.bfloat16, torch.device("cpu"))
    wide = model.spec.hidden_size <= most
    assert model._residual.hidden.dtype == (torch.float32 if wide else torch.bfloat16)
    model.set_aux_layers((0, 1, 2))
    run(model, [0])
    assert model.features is not None and model.features.dtype == torch.bfloat16
    assert bool(model.features[:NUM_TOKENS].ne(0).any(0).all())


def test_a_residual_in_float32_brings_logits_nearer_to_those_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sum is rounded to bfloat16 otherwise, and there are two in a layer."""
    settings = tiny.SETTINGS | {"head_dim": 64, "num_hidden_layers": 16}
    weights = tiny.random_weights(settings)
    for name in weights:
        if "q_proj" in name or "k_proj" in name or "down_proj" in name:
            weights[name] *= 0.3
    weights = {name: value.bfloat16().float() for name, value in weights.items()}
    checkpoint = tiny.write_llama(tmp_path, weights, **settings)
    cpu = torch.device("cpu")
    exact, _ = run(make_model(checkpoint, torch.float32, cpu), EVERY_ROW)
    errors = []
    for most in (0, 2048):
        monkeypatch.setattr(residual, "_MAX_WIDE_HIDDEN_SIZE", most)
        logits, _ = run(make_model(checkpoint, torch.bfloat16, cpu), EVERY_ROW)
        errors.append(float((logits - exact).std() / exact.std()))
    rounded, kept = errors
    assert kept < 0.8 * rounded
