"""The forward pass gives transformers' numbers, however a sequence is cut, batched and paged."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV2Config

import family
import latents
import tiny
from inflight.checkpoint.locate import Checkpoint
from inflight.config import KVDtype
from inflight.models import decoder_cpu
from inflight.models.decoder_cpu import Decoder
from inflight.models.layers.cpu_ops import cpu_ops
from inflight.models.registry import read_spec
from paged_decoder import Paged, blocks_for, load

PROMPT = [5, 17, 99, 3, 150, 42, 42, 8, 61, 120, 7, 33, 90]

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def reference_logits(checkpoint: Checkpoint, tokens: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.float32)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"num_key_value_heads": 1},
        {"num_key_value_heads": 4},
        {"head_dim": 32},
        {"rope_theta": 500.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"rope_scaling": LLAMA3},
        {"rope_scaling": YARN},
        {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0, "beta_fast": 8}},
        {"rope_theta": None, "rope_parameters": LLAMA3 | {"rope_theta": 700.0}},
        {
            "model_type": "mistral",
            "architectures": ["MistralForCausalLM"],
            "sliding_window": None,
        },
    ],
    ids=lambda changes: "-".join(f"{key}:{value}" for key, value in changes.items())[:40],
)
def test_logits_equal_those_of_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    changes = {key: value for key, value in changes.items() if value is not None} | {
        key: None for key in changes if key == "sliding_window"
    }
    checkpoint = tiny.write_llama(tmp_path, **changes)
    (logits,) = Paged(load(checkpoint)).run((PROMPT, 0, len(PROMPT), blocks_for(len(PROMPT))))
    expected = reference_logits(checkpoint, PROMPT)
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4)


def test_dynamic_scaling_beyond_the_trained_context_equals_that_of_transformers(
    tmp_path: Path,
) -> None:
    """A prompt as long as the table: the length that the base follows is the same in both."""
    checkpoint = tiny.write_llama(
        tmp_path, max_position_embeddings=16, rope_scaling={"rope_type": "dynamic", "factor": 4.0}
    )
    tokens = [(7 * i) % 160 for i in range(40)]
    (logits,) = Paged(load(checkpoint, max_len=40)).run((tokens, 0, 40, blocks_for(40)))
    torch.testing.assert_close(logits, reference_logits(checkpoint, tokens), atol=2e-4, rtol=2e-4)


def test_greedy_text_equals_that_of_transformers(tiny_llama: Checkpoint) -> None:
    runner = tiny.make_runner(tiny_llama)
    (ours,) = tiny.generate(runner, [tiny.make_sequence(PROMPT, blocks_for(60))], 40)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama.path, dtype=torch.float32)
    theirs = model.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
        max_new_tokens=40,
        do_sample=False,
        eos_token_id=[],
        pad_token_id=0,
    )[0, len(PROMPT) :].tolist()
    assert ours == theirs
    assert len(set(ours)) > 5  # a text that could have differed


@pytest.mark.parametrize("cuts", [[1, 2, 3], [4, 8], [5, 6], [12], list(range(1, 13))])
def test_a_prompt_in_chunks_scores_as_a_whole_one(tiny_llama: Checkpoint, cuts: list[int]) -> None:
    model = load(tiny_llama)
    (whole,) = Paged(model).run((PROMPT, 0, len(PROMPT), blocks_for(len(PROMPT))))
    paged = Paged(model)
    bounds = [0, *cuts, len(PROMPT)]
    parts = [
        paged.run((PROMPT, a, b, blocks_for(len(PROMPT))))[0] for a, b in itertools.pairwise(bounds)
    ]
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-4, rtol=1e-4)


def test_a_mixed_batch_scores_as_each_alone_and_blocks_may_stand_anywhere(
    tiny_llama: Checkpoint,
) -> None:
    """Decode rows of very different lengths, a prefill and a chunk in the middle, in one step."""
    model = load(tiny_llama)
    random = np.random.default_rng(0)
    lengths = [(12, 13), (0, 9), (3, 4), (60, 61), (5, 11), (0, 1), (44, 45)]
    texts = [random.integers(0, 160, end).tolist() for _, end in lengths]
    free = random.permutation(64).tolist()
    scattered = [[free.pop() for _ in blocks_for(end)] for _, end in lengths]
    together = Paged(model)
    for text, (start, _), blocks in zip(texts, lengths, scattered, strict=True):
        if start:
            together.run((text, 0, start, blocks))
    mixed = together.run(
        *(
            (text, start, end, blocks)
            for text, (start, end), blocks in zip(texts, lengths, scattered, strict=True)
        )
    )
    for text, (start, end), got in zip(texts, lengths, mixed, strict=True):
        (alone,) = Paged(model).run((text, 0, end, blocks_for(end)))
        torch.testing.assert_close(got, alone[start:], atol=1e-4, rtol=1e-4)


# Two parts of 13 and 4 tokens: the ends of both, of one, some in the middle, none, all.
SAMPLED = [[12, 16], [16], [0, 3, 12, 14], [], list(range(17))]


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows that each MLP was given, from here on."""
    found: list[int] = []
    ops = cpu_ops(torch.float32)

    def counted(x: torch.Tensor) -> torch.Tensor:
        found.append(len(x))
        return ops.silu_mul(x)

    monkeypatch.setattr(
        decoder_cpu,
        "cpu_ops",
        lambda dtype, rounds_inputs: dataclasses.replace(ops, silu_mul=counted),
    )
    return found


@pytest.mark.parametrize("sampled", SAMPLED, ids=str)
@pytest.mark.parametrize("num_layers", [None, 1])
def test_the_last_layer_ends_for_the_sampled_rows_alone(
    tiny_llama: Checkpoint, gated: list[int], sampled: list[int], num_layers: int | None
) -> None:
    """The numbers are those of a pass in which every row is sampled, in the cache as well."""
    model = load(tiny_llama)
    parts = ((PROMPT, 0, 13, blocks_for(13)), (PROMPT[::-1], 0, 4, blocks_for(4, first=8)))
    every, some = Paged(model), Paged(model)
    whole = torch.cat(every.run(*parts, num_layers=num_layers))
    gated.clear()
    (logits,) = some.run(*parts, sampled=sampled, num_layers=num_layers)
    torch.testing.assert_close(logits, whole[sampled], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(some.cache.data, every.cache.data, atol=1e-6, rtol=1e-6)
    last = [len(sampled)] if sampled else []
    assert gated == [17] * ((num_layers or 2) - 1) + last


@pytest.mark.parametrize("sampled", SAMPLED, ids=str)
def test_features_of_the_last_layer_have_all_rows(
    tiny_llama: Checkpoint, gated: list[int], sampled: list[int]
) -> None:
    model = load(tiny_llama)
    parts = ((PROMPT, 0, 13, blocks_for(13)), (PROMPT[::-1], 0, 4, blocks_for(4, first=8)))
    whole = torch.cat(Paged(model).run(*parts))
    model.set_aux_layers((1, 2))
    gated.clear()
    (logits,) = Paged(model).run(*parts, sampled=sampled)
    torch.testing.assert_close(logits, whole[sampled], atol=1e-5, rtol=1e-5)
    assert gated == [17, 17]
    assert model.features is not None and model.features.shape == (17, 2 * 64)
    # Norm and head of what came after the last layer are the logits.
    normed, _ = decoder_cpu.ops.rms_norm(model.features[:, 64:], model.weights.norm.weight, 1e-5)
    expected = model.weights.head(normed)
    torch.testing.assert_close(expected, whole, atol=1e-5, rtol=1e-5)


def test_bfloat16_is_close_to_float32(tiny_llama: Checkpoint) -> None:
    (exact,) = Paged(load(tiny_llama)).run((PROMPT, 0, len(PROMPT), blocks_for(len(PROMPT))))
    model = load(tiny_llama, dtype=torch.bfloat16)
    (rough,) = Paged(model, torch.bfloat16).run((PROMPT, 0, len(PROMPT), blocks_for(len(PROMPT))))
    assert rough.dtype == torch.float32
    # Two layers at 8 bits of mantissa: a few percent of the logits' spread.
    assert (rough - exact).square().mean().sqrt() < 0.025 * exact.std()


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8"])
@pytest.mark.parametrize("latent", [False, True], ids=["heads", "latents"])
def test_bfloat16_with_a_cache_of_8_bits_is_close_to_float32_with_one(
    tiny_llama: Checkpoint, tmp_path: Path, kv_dtype: KVDtype, latent: bool
) -> None:
    checkpoint = tiny_llama
    if latent:
        settings = family.SHAPE | latents.SHAPE | latents.EXPERTS | {"pad_token_id": 0}
        model = family.make(DeepseekV2Config(**settings), deviation=0.05)
        checkpoint = family.write_folder(model, tmp_path)
    step = (PROMPT, 0, len(PROMPT), blocks_for(len(PROMPT)))

    def logits(dtype: torch.dtype) -> torch.Tensor:
        model = load(checkpoint, dtype=dtype, kv_cache_dtype=kv_dtype)
        return Paged(model, dtype, kv_dtype).run(step)[0]

    exact = logits(torch.float32)
    assert (logits(torch.bfloat16) - exact).square().mean().sqrt() < 0.1 * exact.std()


def test_progress_rises_to_one(tiny_llama: Checkpoint) -> None:
    seen: list[tuple[str, float]] = []
    Decoder(
        tiny_llama,
        read_spec(tiny_llama),
        torch.float32,
        16,
        lambda what, done: seen.append((what, done)),
    )
    fractions = [done for _, done in seen]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    assert {what for what, _ in seen} == {"weights"}
