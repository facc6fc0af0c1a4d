"""Balanced norms of q and k leave every score as it is, and keys lose less by INT8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    CohereConfig,
    Gemma3TextConfig,
    Glm4MoeConfig,
    HunYuanDenseV1Config,
    Olmo2Config,
    Qwen3Config,
)

import family
import family_gpu
import tiny
from inflight.checkpoint.locate import Checkpoint
from inflight.config import KVDtype, SpeculativeConfig
from inflight.models import loader
from inflight.models.decoder_cuda import Decoder as CudaDecoder
from inflight.models.decoder_cuda import DecoderSettings
from inflight.models.layers.key_balance import balanced
from inflight.models.layers.norm import NormWeights
from inflight.models.registry import read_spec
from inflight_kernels.torch_ops import kv_quantization
from inflight_kernels.torch_ops.transformer import rotary, rotary_tables
from paged_decoder import Paged, blocks_for, load

HEADS, KV_HEADS, WIDTH, TOKENS = 6, 2, 32, 24
# Shapes of the weights of q_norm and k_norm.
SHAPES = {
    "head": ((WIDTH,), (WIDTH,)),
    "heads": ((HEADS, WIDTH), (KV_HEADS, WIDTH)),
    "full": ((HEADS * WIDTH,), (KV_HEADS * WIDTH,)),
}
each_kind = pytest.mark.parametrize("kind", SHAPES)


def norms(kind: str) -> tuple[NormWeights, NormWeights]:
    """With columns of keys that differ in size."""
    random = torch.Generator().manual_seed(0)
    of_q, of_k = SHAPES[kind]
    sizes = torch.randn(of_k, generator=random).exp()
    signs = torch.randint(2, of_k, generator=random) * 2.0 - 1.0
    return NormWeights(torch.rand(of_q, generator=random) + 0.5), NormWeights(signs * sizes)


def rotated(normed: Tensor, norm: NormWeights, heads: int) -> Tensor:
    """[TOKENS, heads, WIDTH] after the norm's weights and RoPE."""
    frequencies = (10_000.0 ** -(torch.arange(WIDTH // 2) * 2.0 / WIDTH)).numpy()
    x = normed.view(TOKENS, heads, WIDTH) * norm.weight.view(-1, WIDTH)
    return rotary(x, *rotary_tables(frequencies, TOKENS))


def scores(pair: tuple[NormWeights, NormWeights], *, rounds_keys: bool = False) -> Tensor:
    """[HEADS, TOKENS, TOKENS] of the same random queries and keys."""
    random = torch.Generator().manual_seed(1)
    q, k = (torch.randn(TOKENS, heads, WIDTH, generator=random) for heads in (HEADS, KV_HEADS))
    queries, keys = rotated(q, pair[0], HEADS), rotated(k, pair[1], KV_HEADS)
    if rounds_keys:
        keys = kv_quantization.dequantize(*kv_quantization.quantize(keys, torch.int8), keys.dtype)
    keys = keys.repeat_interleave(HEADS // KV_HEADS, 1)
    # One sum after the other: a product of matrices may order its sums by their addresses.
    return torch.stack([(queries * keys.roll(shift, 0)).sum(-1) for shift in range(TOKENS)])


@each_kind
def test_scores_differ_by_no_bit(kind: str) -> None:
    own = norms(kind)
    changed = balanced(*own, WIDTH)
    assert not torch.equal(changed[1].weight, own[1].weight)
    assert [norm.weight.shape for norm in changed] == list(SHAPES[kind])
    assert torch.equal(scores(changed), scores(own))


@each_kind
def test_rounded_keys_change_scores_less(kind: str) -> None:
    own = norms(kind)
    exact = scores(own)
    plain, better = (
        (scores(pair, rounds_keys=True) - exact).square().mean().sqrt()
        for pair in (own, balanced(*own, WIDTH))
    )
    assert better < 0.75 * plain


def test_columns_that_rotate_together_have_one_factor_a_power_of_two() -> None:
    own = norms("heads")
    q_norm, k_norm = balanced(*own, WIDTH)
    factors = q_norm.weight / own[0].weight
    assert torch.equal(factors.log2(), factors.log2().round())
    assert torch.equal(*factors.chunk(2, -1))
    of_groups = factors.view(KV_HEADS, -1, WIDTH)
    assert torch.equal(of_groups, (own[1].weight / k_norm.weight)[:, None].expand_as(of_groups))


@pytest.mark.parametrize("size", [0.0, 1.0, 64.0])
def test_columns_of_one_size_stay(size: float) -> None:
    own = (NormWeights(torch.ones(WIDTH)), NormWeights(torch.full((WIDTH,), size)))
    for norm, former in zip(balanced(*own, WIDTH), own, strict=True):
        assert torch.equal(norm.weight, former.weight)


def test_columns_without_keys_have_finite_factors() -> None:
    weight = torch.ones(WIDTH)
    weight[: WIDTH // 4] = weight[WIDTH // 2 : 3 * WIDTH // 4] = 0.0
    q_norm, k_norm = balanced(NormWeights(torch.ones(WIDTH)), NormWeights(weight), WIDTH)
    assert q_norm.weight.isfinite().all() and k_norm.weight.isfinite().all()
    assert torch.equal(k_norm.weight == 0.0, weight == 0.0)


def test_weights_without_values_stay() -> None:
    meta = NormWeights(torch.ones(WIDTH, device="meta"))
    assert balanced(meta, meta, WIDTH) == (meta, meta)


def test_scores_lose_less_by_keys_in_int8() -> None:
    """Keys are spread over all columns, too (see `kv_quantization`), which leaves how long they and
    the queries are: balanced columns make both shorter."""
    width = 128
    random = torch.Generator().manual_seed(0)
    sizes = torch.randn(width // 2, generator=random).exp().repeat(2)
    plain = NormWeights(torch.ones(width)), NormWeights(sizes)
    q, k = torch.randn(2, 500, width, generator=random).unbind()

    def error(q_norm: NormWeights, k_norm: NormWeights) -> float:
        queries, keys = q * q_norm.weight, k * k_norm.weight
        exact = queries.double() @ keys.double().T
        spread = kv_quantization.spread_keys(keys)
        bytes_and_scales = kv_quantization.quantize(spread, torch.int8)
        rounded = kv_quantization.dequantize(*bytes_and_scales, torch.float32)
        found = kv_quantization.spread_queries(queries) @ rounded.T
        return float((found - exact).norm() / exact.norm())

    assert error(*balanced(*plain, width)) < 0.8 * error(*plain)


# ---------------------------------------------------------------- models

CONFIGS: dict[str, Any] = {
    "zero-centered": Gemma3TextConfig(**family.SHAPE, pad_token_id=0),
    "of each head": Qwen3Config(**family.SHAPE),
    "own weights for each head": CohereConfig(**family.SHAPE, pad_token_id=0, use_qk_norm=True),
    "of all heads": Olmo2Config(**family.SHAPE, pad_token_id=0),
    "after RoPE": HunYuanDenseV1Config(**family.SHAPE, pad_token_id=0),
    "partly rotated": Glm4MoeConfig(
        **family.SHAPE, pad_token_id=0, use_qk_norm=True, first_k_dense_replace=4
    ),
}


def with_large_keys(config: Any, folder: Path) -> Checkpoint:
    """A model whose norms make some columns of all keys large."""
    model = family.make(config)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "k_norm" in name or "key_layernorm" in name:
                parameter.mul_(torch.randn(parameter.shape, generator=random).exp())
    return family.write_folder(model, folder)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_logits_differ_by_no_bit_with_a_cache_of_floats(config: Any, tmp_path: Path) -> None:
    checkpoint = with_large_keys(config, tmp_path)
    text = family.tokens()
    step = (text, 0, len(text), blocks_for(len(text)))

    def logits(weights_for: KVDtype, cached: KVDtype) -> Tensor:
        model = load(checkpoint, kv_cache_dtype=weights_for)
        return Paged(model, kv_dtype=cached).run(step)[0]

    exact = logits("auto", "float32")
    assert torch.equal(logits("int8", "float32"), exact)
    assert not torch.equal(logits("int8", "int8"), logits("auto", "int8"))
    assert torch.equal(logits("fp8", "fp8"), logits("auto", "fp8"))


@pytest.mark.parametrize(("kv_cache_dtype", "times"), [("auto", 0), ("fp8", 0), ("int8", 2)])
def test_engines_balance_keys_of_target_and_draft_model_for_int8(
    kv_cache_dtype: KVDtype, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = with_large_keys(CONFIGS["of each head"], tmp_path)
    calls: list[int] = []

    def recorded(q_norm: NormWeights, k_norm: NormWeights, head_dim: int) -> Any:
        calls.append(head_dim)
        return balanced(q_norm, k_norm, head_dim)

    monkeypatch.setattr(loader, "balanced", recorded)
    drafting = SpeculativeConfig(method="draft_model", default=3, model=str(checkpoint.path))
    tiny.make_runner(checkpoint, kv_cache_dtype=kv_cache_dtype, speculative_config=drafting)
    assert calls == [family.SHAPE["head_dim"]] * family.SHAPE["num_hidden_layers"] * times


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_norms_on_gpus_are_those_on_cpus(
    kv_cache_dtype: KVDtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family_gpu.install(monkeypatch)
    checkpoint = with_large_keys(CONFIGS["of each head"], tmp_path)
    settings = DecoderSettings(
        torch.float32, torch.device("cpu"), 64, 40, 32, kv_cache_dtype=kv_cache_dtype
    )
    placed = CudaDecoder(checkpoint, read_spec(checkpoint), settings, lambda *_: None).weights
    expected = load(checkpoint, kv_cache_dtype=kv_cache_dtype).weights
    for layer, own in zip(placed.layers, expected.layers, strict=True):
        for found, norm in ((layer.q_norm, own.q_norm), (layer.k_norm, own.k_norm)):
            assert found is not None and norm is not None
            assert torch.equal(found.weight, norm.weight)
