"""The arithmetic of rooflines, on a model that is small enough to count by hand."""

from __future__ import annotations

import math

import pytest

import bars
import engine
import shapes
from inflight.checkpoint.locate import Checkpoint
from inflight.cli.bench.rows import ROWS, Row
from inflight.models.registry import read_spec
from inflight.models.spec import (
    AttentionSpec,
    LatentSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    RopeSpec,
)
from roofline import Ceilings, Roofline

BYTES = Ceilings(bytes_per_s=1, flops_per_s=math.inf)
FLOPS = Ceilings(bytes_per_s=math.inf, flops_per_s=1)
# Three prompts of five tokens in two steps of at most eight, then three steps of three sequences.
ROW = Row("row", 3, 5, 4)
LAYERS, HEAD = 2 * 8 * (2 * (8 + 4) + 3 * 6), 10 * 8


def model(window: int = 0, tied: bool = False) -> ModelSpec:
    attention = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=2, rope=RopeSpec())
    windowed = AttentionSpec(4, 2, 2, RopeSpec(), window)
    layers = (LayerSpec(attention, MlpSpec(6)), LayerSpec(windowed, MlpSpec(6)))
    return ModelSpec("tiny", 10, 8, layers, 1e-6, 32, tie_word_embeddings=tied)


def seconds(ceilings: Ceilings, window: int = 0, row: Row = ROW) -> float:
    return Roofline(model(window), ceilings, batched_tokens=8).seconds(row)


@pytest.mark.parametrize("tied", [False, True])
def test_a_step_reads_the_layers_and_the_head(tied: bool):
    assert Roofline(model(tied=tied), BYTES).weight_bytes == 2 * (LAYERS + HEAD)
    assert Roofline(model(tied=tied), BYTES, item_bytes=4).weight_bytes == 4 * (LAYERS + HEAD)


def test_bytes_are_those_of_weights_in_each_step_and_of_keys_and_values():
    weights = (2 + 3) * 2 * (LAYERS + HEAD)
    token = 2 * 4 * 2  # key and value of a token in a layer
    written, read = 5 * token, (6 + 7 + 8) * token
    assert seconds(BYTES) == weights + 3 * 2 * (written + read)


def test_flops_are_those_of_the_products_and_of_causal_attention():
    products = 2 * (LAYERS * 15 + HEAD * 3) + 2 * (LAYERS + HEAD) * 9
    prompts, decode = 4 * 8 * (1 + 2 + 3 + 4 + 5), 4 * 8 * (6 + 7 + 8)
    assert seconds(FLOPS) == products + 3 * 2 * (prompts + decode)


@pytest.mark.parametrize("window", [1, 3, 5, 6, 7, 8, 20])
def test_a_window_bounds_the_keys_of_its_layer_alone(window: int):
    lost = [length - min(length, window) for length in range(1, 9)]
    assert seconds(FLOPS) - seconds(FLOPS, window) == 3 * 4 * 8 * sum(lost)
    assert seconds(BYTES) - seconds(BYTES, window) == 3 * 2 * 4 * 2 * sum(lost[5:])


def test_each_part_takes_the_longer_of_its_bytes_and_flops():
    prompt = Row("row", 1, 1, 1)  # per token, weights have as many FLOPs as bytes, attention more
    assert seconds(Ceilings(1, 1), row=prompt) == 2 * (LAYERS + HEAD) + 2 * 4 * 8
    slow_memory = seconds(Ceilings(0.25, 1), row=prompt)
    assert slow_memory == 4 * (2 * (LAYERS + HEAD) + 2 * 2 * 4 * 2)


def test_the_rate_is_in_the_metric_of_the_row():
    roofline = Roofline(model(), BYTES, batched_tokens=8)
    assert roofline.rate(ROW) == 3 * 4 / roofline.seconds(ROW)
    prompts = Row("prefill", 3, 5, 1)
    assert roofline.rate(prompts) == 3 * 5 / roofline.seconds(prompts)


LATENT = LatentSpec(q_rank=6, rank=8, nope_dim=2, rope_dim=2, v_dim=3)


def latent_model() -> ModelSpec:
    attention = AttentionSpec(4, 1, LATENT.key_dim, RopeSpec(), latent=LATENT)
    return ModelSpec("tiny", 10, 8, (LayerSpec(attention, MlpSpec(6)),), 1e-6, 32)


def test_latent_attention_reads_keys_alone_and_prompts_take_narrow_heads():
    joined = 4 * (2 + 3) * 8  # k and v of latents
    layer = 8 * (6 + 10) + 6 * 16 + joined + 4 * 3 * 8 + 8 * 3 * 6
    weights = 5 * 2 * (layer + HEAD)
    read = Roofline(latent_model(), BYTES, batched_tokens=8).seconds(ROW)
    assert read == weights + 3 * 2 * 10 * (5 + 6 + 7 + 8)
    products = 2 * (layer * 15 + HEAD * 3) + 2 * (layer + HEAD) * 9
    prompts, decode = 2 * 4 * (4 + 3) * (1 + 2 + 3 + 4 + 5), 2 * 4 * (10 + 8) * (6 + 7 + 8)
    flops = Roofline(latent_model(), FLOPS, batched_tokens=8).seconds(ROW)
    assert flops == products + 3 * (prompts + decode)
    eighths = Roofline(latent_model(), BYTES, linear_bytes=1).weight_bytes
    assert eighths == layer - joined + 2 * (joined + HEAD)


def test_layers_and_the_cache_may_have_another_format():
    eighths = Roofline(model(), BYTES, batched_tokens=8, linear_bytes=1, kv_bytes=1)
    assert eighths.weight_bytes == LAYERS + 2 * HEAD
    token = 2 * 4  # key and value of a token in a layer
    assert eighths.seconds(ROW) == 5 * (LAYERS + 2 * HEAD) + 3 * 2 * (5 + 6 + 7 + 8) * token
    twice = Roofline(model(), FLOPS, batched_tokens=8, linear_flops_per_s=2)
    saved = LAYERS * (15 + 9)  # half of two for each element and token
    assert seconds(FLOPS) - twice.seconds(ROW) == saved


def test_a_token_of_gpt_oss_reads_four_of_32_experts_and_windows_of_keys():
    spec = shapes.load("gpt-oss-20b").spec
    layer = 2880 * (2 * (64 + 8) * 64 + 32) + 4 * 3 * 2880 * 2880
    head = 201088 * 2880
    prompt = Row("row", 1, 1000, 1)
    decode = Row("row", 1, 1000, 2)
    token = Roofline(spec, BYTES).seconds(decode) - Roofline(spec, BYTES).seconds(prompt)
    read = 12 * (1001 + 128) * 2 * 8 * 64 * 2  # keys and values
    assert token == pytest.approx(2 * (24 * layer + head) + read, rel=1e-9)
    flops = Roofline(spec, FLOPS).seconds(decode) - Roofline(spec, FLOPS).seconds(prompt)
    attended = 12 * (1001 + 128) * 4 * 64 * 64
    assert flops == pytest.approx(2 * (24 * layer + head) + attended, rel=1e-9)


@pytest.mark.parametrize("row", ["bs1", "chat256", "prefill", "long"])
def test_limits_of_fp8_are_rooflines(row: str):
    """At the speeds of a copy, of cuBLAS in bfloat16 and of torch._scaled_mm on an H200."""
    spec = read_spec(Checkpoint(engine.MODEL, "huggingface", random_weights=True))
    ceilings = Ceilings(4.24e12, 684e12)
    fp8 = Roofline(spec, ceilings, linear_flops_per_s=1327e12, linear_bytes=1, kv_bytes=1)
    (wanted,) = (one for one in ROWS if one.name == row)
    limit = bars.load(engine.BARS).of(row, "fp8").limit
    assert fp8.rate(wanted) == pytest.approx(limit, rel=1e-3)
