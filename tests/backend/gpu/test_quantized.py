"""Linear layers of 8 bits on a GPU, against transformers in float64 with rounded values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    CohereConfig,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    NemotronConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3MoeConfig,
)

import family
import family_gpu
import quantized_models
from clear_routing import make_clear
from guarded import relative_error
from inflight.checkpoint.locate import Checkpoint
from inflight.config import EngineConfig, Quantization
from inflight.core.request import Request
from inflight.engine.engine import Engine, generate
from inflight.execution import factory as runners
from inflight.models.linear.scaled_cuda import CudaScaledLinear, QuantizedInputs
from inflight.models.linear.weight_only_cuda import CudaWeightOnlyLinear, DequantizedWeight
from inflight.models.loader import linear_names
from inflight.models.quantization.matrix import DTYPES, quantize
from inflight.models.quantization.writer import quantize_folder
from inflight.models.registry import read_spec
from inflight.sampling.params import SamplingParams
from inflight_kernels.ops.linear.scaled_rows import ScaledRows
from mixed_step import EVERY_ROW, SAMPLED, make_model, run

pytestmark = pytest.mark.gpu

SHAPE = family.SHAPE | {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
PLAIN = {key: value for key, value in SHAPE.items() if key != "head_dim"}
NO_RMS = {key: value for key, value in SHAPE.items() if key != "rms_norm_eps"}
TIED = {"tie_word_embeddings": True}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SHAPE),
    "qwen2, biased": Qwen2Config(**PLAIN),
    "phi3, fused": Phi3Config(**PLAIN | {"pad_token_id": 0}),
    "gemma3, norms after layers": Gemma3TextConfig(**SHAPE | TIED, query_pre_attn_scalar=64),
    "cohere, parallel": CohereConfig(**NO_RMS | TIED),
    "nemotron, without a gate": NemotronConfig(**NO_RMS),
}
EXPERTS = {"num_experts_per_tok": 2, "pad_token_id": 0}
MIXTURES: dict[str, Any] = {
    "qwen3_moe": Qwen3MoeConfig(
        **SHAPE | EXPERTS, num_experts=8, moe_intermediate_size=128, norm_topk_prob=True
    ),
    "gpt_oss, biased": GptOssConfig(
        **SHAPE | EXPERTS, num_local_experts=8, sliding_window=family.WINDOW
    ),
}
CUDA = torch.device("cuda")


def _made(config: Any, folder: Path) -> tuple[Checkpoint, Any]:
    model = family.make(config, deviation=0.1).bfloat16()
    with torch.no_grad():  # as in test_families.py
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "k_proj" in name or "qkv_proj" in name:
                parameter *= 0.25
    return family.write_folder(model, folder), model.double()


def _reference(model: Any) -> torch.Tensor:
    """Logits of the chunks without a history of noise."""
    return torch.cat([family.reference_logits(model, text) for text in family_gpu.TEXTS])


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("kind", ["fp8", "int8", "int8_hadamard"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
def test_logits_are_those_of_transformers_with_rounded_values(
    tmp_path: Path, config: Any, kind: Quantization, batch_invariant: bool
) -> None:
    checkpoint, model = _made(config, tmp_path)
    names = linear_names(read_spec(checkpoint))
    exact = _reference(model)
    quantized_models.round_weights(model, names, kind)
    quantized_models.round_activations(model, names, kind)
    expected = _reference(model)

    decoder = make_model(checkpoint, torch.bfloat16, CUDA, batch_invariant, kind)
    logits, _ = run(decoder, EVERY_ROW)
    found = logits[: len(expected)].double().cpu()
    # bfloat16 rounds on the way, which turns values of 8 bits into their neighbours: the errors
    # differ from the reference's, but are as large.
    error = float((expected - exact).norm())
    ratio = float((found - exact).norm()) / error
    assert 0.75 < ratio < 1.3, ratio
    # Transformed, all values are near others, so more of them turn: without anything in common the
    # errors would be 1.41 apart.
    most = 1.2 if kind == "int8_hadamard" else 1.0
    assert float((found - expected).norm()) / error < most, "no closer than without rounding"


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("config", MIXTURES.values(), ids=list(MIXTURES))
def test_mixtures_compute_what_those_on_cpus_do(
    tmp_path: Path, config: Any, kind: Quantization, batch_invariant: bool
) -> None:
    checkpoint, model = _made(config, tmp_path)
    model.set_experts_implementation("eager")
    make_clear(model, read_spec(checkpoint), family_gpu.TEXTS)
    checkpoint = family.write_folder(model.bfloat16(), tmp_path)
    exact, texts = _reference(model.double()), family_gpu.TEXTS
    whole = [[(index, 0, len(text)) for index, text in enumerate(texts)]]
    expected = torch.cat(family.our_logits(checkpoint, texts, whole, quantization=kind)).double()

    decoder = make_model(checkpoint, torch.bfloat16, CUDA, batch_invariant, kind)
    logits, _ = run(decoder, EVERY_ROW)
    found = logits[: len(expected)].double().cpu()
    ratio = float((found - exact).norm() / (expected - exact).norm())
    assert 0.75 < ratio < 1.3, ratio
    assert (found - expected).norm() < (exact - expected).norm(), "no closer than without rounding"


def _weight_only(config: Any, folder: Path, kind: str) -> tuple[Checkpoint, Any]:
    """A folder with weights of 8 bits for activations of 16, and the model with its values."""
    checkpoint, model = _made(config, folder / "in")
    names = linear_names(read_spec(checkpoint))
    quantize_folder(checkpoint.path, folder / "out", names, kind)
    quantized_models.keep_activations(folder / "out")
    quantized_models.round_weights(model, names, kind)
    return Checkpoint(folder / "out", "huggingface"), model


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
def test_weights_alone_are_as_exact_as_dequantised_ones(
    tmp_path: Path, config: Any, kind: str, batch_invariant: bool
) -> None:
    checkpoint, model = _weight_only(config, tmp_path, kind)
    expected = _reference(model)
    errors = []
    for quantization in ("auto", "none"):
        decoder = make_model(checkpoint, torch.bfloat16, CUDA, batch_invariant, quantization)
        kept = isinstance(decoder.weights.layers[0].dense_mlp.down, CudaWeightOnlyLinear)
        assert kept == (quantization == "auto")
        logits, _ = run(decoder, EVERY_ROW)
        errors.append((logits[: len(expected)].double().cpu() - expected).norm())
    assert errors[0] < 1.3 * errors[1], errors


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("num_tokens", [1, 64, 65, 128, 129, 300])
def test_layers_that_share_memory_agree_with_float64_for_any_number_of_tokens(
    num_tokens: int, kind: str, batch_invariant: bool
) -> None:
    torch.manual_seed(0)
    n, k, dtype = 4096, 2048, torch.bfloat16
    memory = DequantizedWeight(n * k, dtype, CUDA)
    weights = [quantize(torch.randn(n, k, device=CUDA) * k**-0.5, DTYPES[kind]) for _ in range(2)]
    bias = torch.randn(n, device=CUDA).to(dtype)
    layers = [CudaWeightOnlyLinear(one, bias, memory, batch_invariant) for one in weights]
    x = torch.randn(384, k, device=CUDA).to(dtype)
    totals = [torch.randn(384, n, device=CUDA).to(dtype) for _ in layers]
    outs = [torch.zeros(384, n, device=CUDA, dtype=dtype) for _ in layers]
    gated = [torch.zeros(384, n // 2, device=CUDA, dtype=dtype) for _ in layers]
    before = [total.clone() for total in totals]
    for layer, total, out, half in zip(layers, totals, outs, gated, strict=True):
        assert layer.gated(x, out, half, num_tokens, layer) is half
        layer.product(x, out, num_tokens)
        layer.add(x, total, num_tokens)
    for i, weight in enumerate(weights):
        exact = x[:num_tokens].double() @ weight.dequantized().double().T + bias.double()
        gate, up = exact.chunk(2, -1)
        both = exact + before[i][:num_tokens].double()
        # A dequantised weight is rounded, and so may be what is between two kernels.
        assert relative_error(outs[i][:num_tokens], exact) < 6e-3
        assert relative_error(totals[i][:num_tokens], both) < 6e-3
        assert relative_error(gated[i][:num_tokens], F.silu(gate) * up) < 1e-2


@pytest.mark.parametrize("num_tokens", [64, 65, 300])
def test_an_mlp_is_as_exact_as_its_rounded_values(num_tokens: int) -> None:
    """Whether what is between its layers is quantised with a row's own scale, by a kernel of its
    own, or by the first layer with a coarse one."""
    torch.manual_seed(0)
    size, width, dtype = 1024, 3072, torch.bfloat16
    shapes = [(2 * width, size), (size, width)]
    weights = [quantize(torch.randn(n, k, device=CUDA) * k**-0.5, DTYPES["fp8"]) for n, k in shapes]
    wide = [weight.dequantized().double() for weight in weights]
    x = torch.randn(384, size, device=CUDA).to(dtype)
    gate, up = (x[:num_tokens].double() @ wide[0].T).chunk(2, -1)
    expected = (F.silu(gate) * up) @ wide[1].T
    for batch_invariant in (False, True):
        inputs = QuantizedInputs(384, width, CUDA)
        gate_up, down = (
            CudaScaledLinear(ScaledRows(one.values, one.scales), None, inputs, batch_invariant)
            for one in weights
        )
        total = torch.zeros(384, size, device=CUDA, dtype=dtype)
        scratch = torch.full((384, 2 * width), torch.nan, device=CUDA, dtype=dtype)
        between = torch.zeros(384, width, device=CUDA, dtype=dtype)
        inner = gate_up.gated(x, scratch, between, num_tokens, down)
        assert isinstance(inner, ScaledRows) == (num_tokens > 64 and not batch_invariant)
        down.add(inner, total, num_tokens)
        # Twice e4m3's 0.027, once of them by way of the gate, which doubles it.
        assert 0.03 < relative_error(total[:num_tokens], expected) < 0.07
        assert (total[num_tokens:] == 0).all()


@pytest.mark.parametrize("sampled", SAMPLED, ids=str)
def test_the_rows_of_a_step_are_independent_of_each_other(
    tmp_path: Path, sampled: list[int]
) -> None:
    """With batch_invariant bit by bit, though the last layer has fewer rows."""
    checkpoint, _ = _made(CONFIGS["llama"], tmp_path)
    decoder = make_model(checkpoint, torch.bfloat16, CUDA, True, "fp8")
    whole, whole_cache = run(decoder, EVERY_ROW)
    logits, cache = run(decoder, sampled)
    assert torch.equal(cache, whole_cache)
    assert torch.equal(logits, whole[sampled])


@pytest.mark.parametrize("config", ["llama", "gemma3, norms after layers"])
def test_texts_of_a_batch_are_those_of_single_requests(tmp_path: Path, config: str) -> None:
    checkpoint, _ = _made(CONFIGS[config], tmp_path)
    settings = EngineConfig(
        model=str(checkpoint.path),
        device="cuda",
        num_blocks=256,
        max_num_seqs=8,
        max_model_len=128,
        quantization="fp8",
        batch_invariant=True,
    )
    runner, spec = runners.build(settings, checkpoint, lambda what, done: None)
    engine = Engine(settings, runner, spec.max_model_len(settings), ())
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=24)
    prompts = [family.tokens(5 + 3 * index, seed=index) for index in range(7)]
    together = generate(engine, [Request(i, prompt, params) for i, prompt in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        alone = generate(engine, [Request(100 + i, prompt, params)])
        assert alone[100 + i] == together[i]
