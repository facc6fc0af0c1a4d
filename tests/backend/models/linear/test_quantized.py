"""Quantised linear layers on a CPU compute what transformers does with rounded values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Glm4Config, Phi3Config, Qwen2Config

import family
import family_engine
import quantized_models
from inflight.checkpoint.locate import Checkpoint
from inflight.config import EngineConfig, Quantization, SpeculativeConfig
from inflight.core.request import Request
from inflight.engine.engine import Engine
from inflight.execution import factory
from inflight.models.linear.quantized import CpuQuantizedLinear
from inflight.models.loader import linear_names
from inflight.models.quantization.matrix import DTYPES, quantize
from inflight.models.quantization.writer import quantize_folder
from inflight.models.registry import read_spec
from inflight.sampling.params import SamplingParams
from inflight_kernels.torch_ops.quantization import spread_block

SHAPE = family.SHAPE | {"pad_token_id": 0}
MODELS: dict[str, Any] = {
    "qwen2, biased and tied": Qwen2Config(**SHAPE | {"tie_word_embeddings": True}),
    "phi3, fused": Phi3Config(**SHAPE | {"head_dim": 16}),
    # Its rows of q and k are put into another order.
    "glm4, biased and fused": Glm4Config(**SHAPE, attention_bias=True),
}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_the_product_is_that_of_the_rounded_matrices(kind: str, dtype: torch.dtype) -> None:
    x, weight, bias = drawn(9, 96).to(dtype), drawn(40, 96, seed=1), drawn(40, seed=2).to(dtype)
    exact = quantized_models.rounded(x.float(), kind).double()
    exact = exact @ quantized_models.rounded(weight, kind).double().t()
    layer = CpuQuantizedLinear(quantize(weight, DTYPES[kind]), bias)
    found = layer(x)
    assert found.dtype == dtype
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    expected = (exact + bias).to(dtype)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    without = CpuQuantizedLinear(quantize(weight, DTYPES[kind]), None)
    torch.testing.assert_close(without(x), exact.to(dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("width", [96, 64, 48])
def test_inputs_are_spread_as_the_weight_is(width: int) -> None:
    x, weight = drawn(9, width), drawn(40, width, seed=1)
    x[:, 3] *= 50.0
    found = CpuQuantizedLinear(quantize(weight, torch.int8, spread_block(width)), None)(x)
    one, other = (quantized_models.rounded(part, "int8_hadamard") for part in (x, weight))
    expected = one.double() @ other.double().t()
    plain = CpuQuantizedLinear(quantize(weight, torch.int8), None)(x)
    torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-4)
    exact = x.double() @ weight.double().t()
    assert (found - exact).norm() < 0.5 * (plain - exact).norm(), "the large column costs less"


def logits(folder: Path, quantization: Quantization) -> Tensor:
    texts = [family.tokens(seed=1), family.tokens(seed=2)]
    checkpoint = Checkpoint(folder, "huggingface")
    found = family.our_logits(checkpoint, texts, family.MIXED, quantization=quantization)
    return torch.cat(found)


def reference_logits(model: Any) -> Tensor:
    texts = [family.tokens(seed=1), family.tokens(seed=2)]
    return torch.cat([family.reference_logits(model, text) for text in texts])


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("config", MODELS.values(), ids=list(MODELS))
def test_logits_equal_those_of_transformers_with_rounded_values(
    tmp_path: Path, config: Any, kind: Quantization
) -> None:
    model = family.make(config, deviation=0.05)
    source, written = tmp_path / "in", tmp_path / "out"
    names = linear_names(read_spec(family.write_folder(model, source)))
    quantize_folder(source, written, names, kind)
    weights_only, expected = quantized_models.rounded_logits(model, names, kind, reference_logits)

    torch.testing.assert_close(logits(written, "none"), weights_only, rtol=1e-3, atol=1e-4)
    found = logits(written, "auto")
    # A sum in another order may round a value to its other neighbour, so not every logit is equal.
    assert (found - expected).norm() < 0.2 * (weights_only - expected).norm()
    assert (found - expected).abs().median() < 1e-4
    assert torch.equal(logits(source, kind), found), "weights quantised when they are loaded"
    assert torch.equal(logits(written, kind), found), "a checkpoint that is quantised already"


@pytest.mark.parametrize("config", MODELS.values(), ids=list(MODELS))
def test_logits_equal_those_with_values_that_are_rounded_transformed(
    tmp_path: Path, config: Any
) -> None:
    model = family.make(config, deviation=0.05)
    checkpoint = family.write_folder(model, tmp_path)
    names, kind = linear_names(read_spec(checkpoint)), "int8_hadamard"
    weights_only, expected = quantized_models.rounded_logits(model, names, kind, reference_logits)
    found = logits(tmp_path, kind)
    assert (found - expected).norm() < 0.2 * (weights_only - expected).norm()
    assert (found - expected).abs().median() < 1e-4


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_formats_for_activations_of_16_bits_are_dequantised(
    tmp_path: Path, kind: Quantization
) -> None:
    model = family.make(MODELS["phi3, fused"], deviation=0.05)
    names = linear_names(read_spec(family.write_folder(model, tmp_path / "in")))
    quantize_folder(tmp_path / "in", tmp_path / "out", names, kind)
    both = logits(tmp_path / "out", "auto")
    quantized_models.keep_activations(tmp_path / "out")
    found = logits(tmp_path / "out", "auto")
    assert torch.equal(found, logits(tmp_path / "out", "none"))
    assert torch.equal(both, logits(tmp_path / "out", kind)), "the setting quantises them"
    assert not torch.equal(found, both)


def texts_of(checkpoint: Checkpoint, speculation: SpeculativeConfig | None) -> Any:
    """Greedy texts of prompts with a common beginning: all at once, then each alone."""
    config = EngineConfig(
        model=str(checkpoint.path),
        num_threads=1,
        block_size=4,
        num_blocks=64,
        max_num_seqs=4,
        max_prefill_chunk=7,
        max_model_len=64,
        quantization="int8",
        speculative_config=speculation,
    )
    runner, spec = factory.build(config, checkpoint, lambda what, fraction: None)
    engine = Engine(config, runner, spec.max_model_len(config), ())
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=12)
    common = family.tokens(9)
    prompts = [common + family.tokens(count, seed=count) for count in (1, 6, 11, 3)]
    requests = [Request(index, prompts[index % 4], params) for index in range(8)]
    groups = [requests[:4], *([request] for request in requests[4:])]
    texts = [
        [token for event in events for token in event.token_ids]
        for group in groups
        for events in family_engine.run(engine, group).values()
    ]
    return texts, engine.stats()


def test_drafts_cached_prefixes_and_other_requests_leave_no_trace_in_texts(tmp_path: Path) -> None:
    checkpoint = family.write_folder(family.make(MODELS["phi3, fused"]), tmp_path)
    plain, _ = texts_of(checkpoint, None)
    drafted, stats = texts_of(checkpoint, family_engine.self_drafting(4))
    assert plain == drafted and plain[:4] == plain[4:]
    assert stats.num_cached_tokens > 0
    assert stats.num_accepted_tokens == stats.num_drafted_tokens > 0
