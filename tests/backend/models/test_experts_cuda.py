"""Mixtures of experts on GPUs, with the kernels' definitions in the kernels' place."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Glm4MoeConfig, GptOssConfig, PretrainedConfig, Qwen3MoeConfig

import family
import family_gpu
import grouped_folders
import mixed_step
from clear_routing import make_clear
from inflight.checkpoint.locate import Checkpoint
from inflight.config import EngineConfig, Quantization
from inflight.errors import ConfigError
from inflight.execution.factory import resolve_device
from inflight.models import decoder_cuda, gpu_support
from inflight.models.cuda_placement import CudaPlacement
from inflight.models.decoder_cuda import Decoder
from inflight.models.experts_cuda import CudaExperts, alternating, router_parts
from inflight.models.gpu_support import gpu_obstacle
from inflight.models.linear.scaled_cuda import QuantizedInputs
from inflight.models.linear.weight_only_cuda import DequantizedWeight
from inflight.models.loader import ExpertParts, load_weights
from inflight.models.quantization.grouped import GroupedMatrix
from inflight.models.quantization.layouts.floats import E2M1
from inflight.models.quantization.matrix import Matrix, QuantizedMatrix, dequantized, quantize
from inflight.models.quantization.rounding import quantize_groups
from inflight.models.registry import read_spec
from inflight.models.spec import ModelSpec, MoeSpec
from inflight_kernels.ops.linear import grouped_rows
from inflight_kernels.ops.linear.grouped_rows import GroupedKind, GroupedRows
from inflight_kernels.ops.linear.grouped_rows import dequantized as dequantized_rows
from inflight_kernels.ops.linear.record_scales import Units
from inflight_kernels.ops.linear.scaled_rows import ScaledRows

EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "pad_token_id": 0,
}
OF_GPT_OSS = {"num_local_experts": 8, "num_experts_per_tok": 3, "pad_token_id": 0}
CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def _definitions(monkeypatch: pytest.MonkeyPatch) -> None:
    family_gpu.install(monkeypatch)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    model = family.make(Qwen3MoeConfig(**family.SHAPE | EXPERTS), deviation=0.05)
    return family.write_folder(model, tmp_path / "model")


def decoder(checkpoint: Checkpoint, quantization: Quantization) -> Decoder:
    return mixed_step.make_model(checkpoint, torch.float32, CPU, quantization=quantization)


def logits(ours: Decoder) -> Tensor:
    """Of the texts without a history of noise."""
    found, _ = mixed_step.run(ours, mixed_step.EVERY_ROW)
    return found[: sum(len(text) for text in family_gpu.TEXTS)]


# ---------------------------------------------------------------- weights


def test_a_router_that_was_stored_in_16_bits_is_one_matrix() -> None:
    weight = torch.randn(5, 40).bfloat16().float()
    assert torch.equal(router_parts(weight, torch.bfloat16).float(), weight)


def test_a_router_in_float32_is_a_sum_of_matrices() -> None:
    weight = torch.randn(5, 40)
    parts = router_parts(weight, torch.bfloat16)
    assert parts.shape == (15, 40)
    total = parts.double().view(3, 5, 40).sum(0)
    torch.testing.assert_close(total, weight.double(), rtol=2.0**-23, atol=0)
    assert torch.equal(router_parts(weight, torch.float32), weight)


def test_rows_of_gate_and_up_alternate_by_eight() -> None:
    gate_up = torch.arange(48)[:, None].expand(48, 3)
    expected = [*range(8), *range(24, 32), *range(8, 16), *range(32, 40)]
    assert alternating(gate_up)[:32, 0].tolist() == expected


def placed(weights: list[Matrix], quantization: Quantization) -> tuple[Tensor, ...]:
    """Values of `down` of experts with these weights [16, 32], and scales if they have any."""
    memory = QuantizedInputs(16, 32, CPU)
    placement = CudaPlacement(torch.bfloat16, CPU, False, quantization, memory)
    zeros: Matrix = torch.zeros(16, 16)
    if isinstance(weights[0], QuantizedMatrix):  # as both layers have one format
        zeros = quantize(zeros, FP8)
    gate_up = [zeros] * 2
    experts = [ExpertParts(gate_up, [weight], [], []) for weight in weights]
    down = placement.experts(len(experts), iter(experts)).down
    return (down.values.float(), down.scales) if isinstance(down, ScaledRows) else (down,)


def test_experts_are_in_the_format_of_the_first_one() -> None:
    plain, quantized = torch.randn(16, 32).bfloat16(), quantize(torch.randn(16, 32), FP8)
    (first,) = placed([plain, quantized], "auto")
    assert torch.equal(first, torch.stack([plain, quantized.dequantized().bfloat16()]))
    values, scales = placed([quantized, plain], "auto")
    again = quantize(plain, FP8)
    assert torch.equal(values, torch.stack([quantized.values.float(), again.values.float()]))
    assert torch.equal(scales, torch.cat([quantized.scales, again.scales]))


def test_experts_are_quantised_or_dequantised_by_the_setting() -> None:
    plain, quantized = torch.randn(16, 32).bfloat16(), quantize(torch.randn(16, 32), FP8)
    values, scales = placed([plain, plain], "int8")
    assert torch.equal(values[1] * scales[16:, None], quantize(plain, torch.int8).dequantized())
    (whole,) = placed([quantized], "none")
    assert torch.equal(whole[0], quantized.dequantized().bfloat16())


def test_both_layers_of_experts_are_in_one_format() -> None:
    memory = QuantizedInputs(16, 32, CPU)
    placement = CudaPlacement(torch.bfloat16, CPU, False, "auto", memory)
    gate, down = quantize(torch.randn(16, 16), FP8), torch.randn(16, 16).bfloat16()
    experts = placement.experts(1, iter([ExpertParts([gate, gate], [down], [], [])]))
    assert isinstance(experts.gate_up, Tensor) and isinstance(experts.down, Tensor)
    exact = gate.dequantized().bfloat16()
    assert torch.equal(experts.gate_up[0], alternating(torch.cat([exact, exact])))
    assert torch.equal(experts.down[0], down)


# ---------------------------------------------------------------- codes with scales of groups


def in_groups(n: int, k: int, seed: int, group: int = 32, scale: float = 0.01) -> GroupedMatrix:
    """As MXFP4 has it."""
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (n, k), generator=random, dtype=torch.uint8)
    powers = 2.0 ** torch.randint(-3, 3, (n, k // group), generator=random)
    return GroupedMatrix(codes, 4, powers * scale, levels=E2M1)


def expert(seed: int, scale: float = 0.015625) -> ExpertParts:
    """Of a width of 32 and a hidden size of 64."""
    gate, up = (in_groups(32, 64, seed + which, scale=scale) for which in range(2))
    down = in_groups(64, 32, seed + 2, scale=scale)
    return ExpertParts([gate, up], [down], [], [])


def placed_experts(experts: list[ExpertParts], **settings: Any) -> CudaExperts:
    settings = {"groups": DequantizedWeight(64 * 64, torch.bfloat16, CPU)} | settings
    placement = CudaPlacement(torch.bfloat16, CPU, False, **settings)
    return placement.experts(len(experts), iter(experts))


def in_16_bits(experts: list[ExpertParts]) -> tuple[Tensor, Tensor]:
    """Gate and up by turns, and down."""
    first = [torch.cat([dequantized(part) for part in one.gate_up]) for one in experts]
    last = [torch.cat([dequantized(part) for part in one.down]) for one in experts]
    return torch.stack([alternating(one) for one in first]).bfloat16(), torch.stack(last).bfloat16()


def check_values(found: CudaExperts, expected: tuple[Tensor, Tensor]) -> None:
    for weight, exact in zip((found.gate_up, found.down), expected, strict=True):
        if isinstance(weight, GroupedRows):
            weight = dequantized_rows(weight).view(exact.shape)
        assert isinstance(weight, Tensor) and torch.equal(weight, exact)


def test_experts_keep_their_codes() -> None:
    experts = [expert(seed) for seed in (1, 11, 21)]
    found = placed_experts(experts)
    assert isinstance(found.gate_up, GroupedRows) and isinstance(found.down, GroupedRows)
    assert found.gate_up.kind.codes == found.down.kind.codes == grouped_rows.E2M1
    assert (found.count, found.input_dtype) == (3, torch.bfloat16)
    check_values(found, in_16_bits(experts))


def test_experts_are_dequantised_where_codes_are_not_kept() -> None:
    experts = [expert(seed) for seed in (1, 11)]
    found = placed_experts(experts, groups=None)
    assert isinstance(found.gate_up, Tensor) and isinstance(found.down, Tensor)
    check_values(found, in_16_bits(experts))


def other_kind(like: ExpertParts) -> ExpertParts:
    """Integers in the place of floats of 4 bits."""
    parts = [dataclasses.replace(part, levels=None, zero=8) for part in like.gate_up]  # type: ignore[type-var]
    return ExpertParts(parts, like.down, [], [])


@pytest.mark.parametrize(
    "second",
    [
        other_kind(expert(11)),
        ExpertParts([part.dequantized() for part in expert(11).gate_up], expert(11).down, [], []),
        # Scales above those of records of e2m1, which a table takes.
        expert(11, scale=1024.0),
    ],
    ids=["other groups", "16 bits", "large scales"],
)
def test_experts_that_differ_from_the_first_one_have_16_bits_as_all_then_have(
    second: ExpertParts,
) -> None:
    for experts in ([expert(1), second, expert(21)], [second, expert(1)]):
        found = placed_experts(experts)
        assert isinstance(found.gate_up, Tensor) and isinstance(found.down, Tensor)
        check_values(found, in_16_bits(experts))


def in_units(rows: int, seed: int, unit: float) -> GroupedMatrix:
    """[rows, 256] as GGUF's Q4_K has it: scales and minimums are integers times a unit."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, 256), dtype=torch.uint8, generator=generator)
    units = unit * (1 + torch.rand(rows, 1, generator=generator)).half().float()
    scales, low = (torch.randint(1, 64, (rows, 8), generator=generator) * units for _ in range(2))
    return GroupedMatrix(codes, 4, scales, -low, units=Units(units, -units))


def expert_in_units(seed: int, unit: float = 2.0**-10) -> ExpertParts:
    gate, up, down = (in_units(256, seed + which, unit) for which in range(3))
    return ExpertParts([gate, up], [down], [], [])


def test_experts_with_scales_in_units_keep_them_if_all_do() -> None:
    """A scale may be too large for them, as those of the last expert here are."""
    kept, large = [expert_in_units(seed) for seed in (1, 11)], expert_in_units(21, 2.0**-6)
    for experts, has_units in ((kept, True), ([*kept, large], False), ([large, *kept], False)):
        found = placed_experts(experts)
        for weight, exact in zip((found.gate_up, found.down), in_16_bits(experts), strict=True):
            assert isinstance(weight, GroupedRows)
            assert weight.kind == GroupedKind(grouped_rows.INT4, 32, True, units=has_units)
            values = dequantized_rows(weight).view(exact.shape).double()
            assert (values - exact.double()).abs().max() <= 2.0**-6 * exact.double().abs().max()


def test_gate_and_up_in_different_groups_are_dequantised() -> None:
    one = expert(1)
    parts = [one.gate_up[0], quantize_groups(dequantized(one.gate_up[1]), 32)]
    experts = [ExpertParts(parts, one.down, [], [])]
    found = placed_experts(experts)
    assert isinstance(found.gate_up, Tensor) and isinstance(found.down, Tensor)
    check_values(found, in_16_bits(experts))


def test_columns_in_another_order_are_dequantised() -> None:
    one = expert(1)
    (down,) = one.down
    assert isinstance(down, GroupedMatrix)
    moved = dataclasses.replace(down, columns=torch.arange(32).flip(0))
    experts = [ExpertParts(one.gate_up, [moved], [], [])]
    found = placed_experts(experts)
    assert isinstance(found.down, Tensor)
    check_values(found, in_16_bits(experts))


def test_experts_of_16_bits_are_rounded_by_the_setting() -> None:
    plain = [
        ExpertParts([torch.randn(32, 64), torch.randn(32, 64)], [torch.randn(64, 32)], [], [])
        for _ in range(2)
    ]
    found = placed_experts(plain, quantization="int4")
    assert isinstance(found.gate_up, GroupedRows) and isinstance(found.down, GroupedRows)
    assert found.gate_up.kind.codes == grouped_rows.INT4
    for weight, exact in zip((found.gate_up, found.down), in_16_bits(plain), strict=True):
        rounded = dequantized_rows(weight).view(exact.shape).float()
        assert 0 < (rounded - exact.float()).norm() < 0.12 * exact.float().norm()
    kept = [expert(1), expert(11)]
    check_values(placed_experts(kept, quantization="int4"), in_16_bits(kept))


def test_parts_of_a_shared_expert_stay_in_the_groups_of_the_others() -> None:
    gate, up, down = (in_groups(64, 64, seed, scale=0.015625) for seed in (5, 6, 7))
    shared = ExpertParts([gate, up], [down], [], [])
    experts = [expert(1), *shared.split(2)]
    assert all(one.is_stored_as(experts[0]) for one in experts)
    found = placed_experts(experts)
    assert isinstance(found.gate_up, GroupedRows) and isinstance(found.down, GroupedRows)
    check_values(found, in_16_bits(experts))


def gpt_oss_in_groups(folder: Path) -> Checkpoint:
    """Its tokens have all experts, so that rounding chooses no other ones."""
    shape = family.SHAPE | {"num_local_experts": 4, "num_experts_per_tok": 4, "pad_token_id": 0}
    model = family.make(GptOssConfig(**shape, sliding_window=family.WINDOW))
    grouped_folders.write_mxfp4(model, folder)
    return Checkpoint(folder, "huggingface")


def test_a_model_in_groups_computes_what_it_does_in_16_bits(tmp_path: Path) -> None:
    """All values of MXFP4 are numbers of bfloat16."""
    checkpoint = gpt_oss_in_groups(tmp_path)
    kept, exact = (
        mixed_step.make_model(checkpoint, torch.bfloat16, CPU, quantization=quantization)
        for quantization in ("auto", "none")
    )
    kept_experts, exact_experts = (
        model.weights.layers[0].mlp.experts  # type: ignore[union-attr]
        for model in (kept, exact)
    )
    assert isinstance(kept_experts.gate_up, GroupedRows)
    assert isinstance(exact_experts.gate_up, Tensor)
    check_values(kept_experts, (exact_experts.gate_up, exact_experts.down))
    torch.testing.assert_close(logits(kept), logits(exact), atol=0.05, rtol=0.02)


@pytest.mark.parametrize(
    ("quantization", "dtype", "is_kept"),
    [
        ("auto", torch.bfloat16, True),
        ("none", torch.bfloat16, False),
        ("auto", torch.float32, False),
    ],
)
def test_the_setting_and_the_type_of_activations_decide_whether_codes_are_kept(
    tmp_path: Path, quantization: Quantization, dtype: torch.dtype, is_kept: bool
) -> None:
    checkpoint = gpt_oss_in_groups(tmp_path)
    model = mixed_step.make_model(checkpoint, dtype, CPU, quantization=quantization)
    for layer in model.weights.layers:
        for weight in (layer.mlp.experts.gate_up, layer.mlp.experts.down):  # type: ignore[union-attr]
            assert isinstance(weight, GroupedRows if is_kept else Tensor)


def test_experts_without_memory_have_the_kinds_of_those_with_it(tmp_path: Path) -> None:
    checkpoint, meta = gpt_oss_in_groups(tmp_path), torch.device("meta")
    found = []
    for device in (CPU, meta):
        memory = DequantizedWeight(64 * 64, torch.bfloat16, device)
        placement = CudaPlacement(torch.bfloat16, device, False, groups=memory)
        weights = load_weights(
            checkpoint, read_spec(checkpoint), placement, lambda what, done: None, device
        )
        found.append(weights.layers[0].mlp.experts)  # type: ignore[union-attr]
    for kept, shaped in zip(*((one.gate_up, one.down) for one in found), strict=True):
        assert isinstance(kept, GroupedRows) and isinstance(shaped, GroupedRows)
        assert shaped.records.is_meta and shaped.records.shape == kept.records.shape
        assert (shaped.kind, shaped.n, shaped.k) == (kept.kind, kept.n, kept.k)


# ---------------------------------------------------------------- layers


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize(
    "config",
    [
        Qwen3MoeConfig(**family.SHAPE | EXPERTS),
        GptOssConfig(**family.SHAPE | OF_GPT_OSS, sliding_window=family.WINDOW),
    ],
    ids=["qwen3_moe", "gpt_oss, biased"],
)
def test_quantised_experts_compute_what_those_on_cpus_do(
    tmp_path: Path, config: PretrainedConfig, kind: Quantization
) -> None:
    checkpoint = family.write_folder(family.make(config, deviation=0.05), tmp_path)
    ours, exact = decoder(checkpoint, kind), decoder(checkpoint, "none")
    experts = ours.weights.layers[0].mlp.experts  # type: ignore[union-attr]
    assert isinstance(experts.gate_up, ScaledRows) and isinstance(experts.down, ScaledRows)
    texts = family_gpu.TEXTS
    whole = [[(index, 0, len(text)) for index, text in enumerate(texts)]]
    expected = torch.cat(family.our_logits(checkpoint, texts, whole, quantization=kind))
    errors = (logits(ours) - expected).norm(dim=1)
    rounding = (logits(exact) - expected).norm(dim=1)
    # A value half way between two may be rounded the other way, which the tokens after it see.
    assert errors.median() < 0.02 * rounding.median(), errors
    assert rounding.median() > 0


GROUPS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "pad_token_id": 0,
}


@pytest.mark.parametrize(
    "config",
    [
        Qwen3MoeConfig(**family.SHAPE | EXPERTS),
        GptOssConfig(**family.SHAPE | OF_GPT_OSS, sliding_window=family.WINDOW),
        Glm4MoeConfig(**family.SHAPE | GROUPS),
    ],
    ids=["qwen3_moe", "gpt_oss", "glm4_moe"],
)
def test_rounding_changes_no_choice_of_clear_routers(
    tmp_path: Path, config: PretrainedConfig
) -> None:
    model = family.make(config, deviation=0.1).bfloat16()
    model.set_experts_implementation("eager")
    checkpoint = family.write_folder(model, tmp_path)
    make_clear(model.double(), read_spec(checkpoint), family_gpu.TEXTS)
    checkpoint = family.write_folder(model.bfloat16(), tmp_path)
    ours = mixed_step.make_model(checkpoint, torch.bfloat16, CPU)
    expected = [family.reference_logits(model.double(), text) for text in family_gpu.TEXTS]
    torch.testing.assert_close(logits(ours).double(), torch.cat(expected), atol=0.15, rtol=0.03)


# ---------------------------------------------------------------- refusals


def with_experts(spec: ModelSpec, **changes: object) -> ModelSpec:
    mlp = spec.layers[0].mlp
    assert isinstance(mlp, MoeSpec)
    layer = dataclasses.replace(spec.layers[0], mlp=dataclasses.replace(mlp, **changes))
    return dataclasses.replace(spec, layers=(layer,))


@pytest.mark.parametrize(
    ("changes", "obstacle"),
    [
        ({"num_experts": 513}, "more than 512 experts are not supported on GPUs"),
        ({"top_k": 32}, "more than 31 experts per token are not supported on GPUs"),
        ({"num_groups": 33}, "more than 32 groups of experts are not supported on GPUs"),
    ],
)
def test_what_the_kernels_do_not_route_is_refused(
    checkpoint: Checkpoint, changes: dict[str, int], obstacle: str
) -> None:
    spec = read_spec(checkpoint)
    assert gpu_obstacle(spec, family_gpu.MAX_LEN) is None
    assert gpu_obstacle(with_experts(spec, **changes), family_gpu.MAX_LEN) == obstacle


def test_experts_that_the_kernels_do_not_multiply_are_refused(checkpoint: Checkpoint) -> None:
    spec = read_spec(checkpoint)
    mlp = spec.layers[0].mlp
    assert isinstance(mlp, MoeSpec)
    for changes, what in (
        ({"width": 24}, "a width of 24 of experts (allowed: multiples of 16) is"),
        ({"activation": "gelu_tanh"}, "gelu_tanh in experts is"),
    ):
        expert = dataclasses.replace(mlp.expert, **changes)  # type: ignore[arg-type]
        found = gpu_obstacle(with_experts(spec, expert=expert), family_gpu.MAX_LEN)
        assert found == f"{what} not supported on GPUs"
    shared = dataclasses.replace(mlp.expert, activation="gelu_tanh")
    found = gpu_obstacle(with_experts(spec, shared=shared), family_gpu.MAX_LEN)
    assert found == "a shared expert with another gate than silu is not supported on GPUs"


def test_a_hidden_size_that_products_do_not_take_is_refused(checkpoint: Checkpoint) -> None:
    spec = dataclasses.replace(read_spec(checkpoint), hidden_size=72)
    assert gpu_obstacle(spec, family_gpu.MAX_LEN) == (
        "experts of a hidden size of 72 (allowed: multiples of 16) are not supported on GPUs"
    )


def test_other_gpus_refuse_experts(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_cuda, "is_hopper", lambda: False)
    with pytest.raises(
        ConfigError, match="a mixture of experts is supported on Hopper GPUs only; use device: cpu"
    ):
        decoder(checkpoint, "none")


@pytest.mark.parametrize(("capability", "device"), [((9, 0), "cuda"), ((8, 0), "cpu")])
def test_auto_is_the_cpu_where_experts_have_no_kernels(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    device: str,
) -> None:
    shape = family.SHAPE | EXPERTS | {"head_dim": 64}
    checkpoint = family.write_folder(family.make(Qwen3MoeConfig(**shape)), tmp_path)
    monkeypatch.setattr(gpu_support, "GPU_HEAD_DIMS", (64,))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    placed, where = resolve_device(EngineConfig(model=".", device="auto"), checkpoint)
    assert placed.device == device
    assert ("Hopper GPUs only" in where) == (device == "cpu")
