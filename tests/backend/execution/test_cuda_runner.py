"""Tests of the GPU runner that need no GPU; the others are in tests/backend/gpu."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import pkgutil
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GptOssConfig

import family
import grouped_folders
import host_kernels
import recorded_launches
import tiny
from inflight.checkpoint.locate import Checkpoint, locate
from inflight.config import EngineConfig, KVDtype, SpeculativeConfig
from inflight.core.batch import Batch
from inflight.core.request import AUTO_DRAFTS, Request
from inflight.core.sequence import Sequence
from inflight.core.step_size import StepSize
from inflight.engine.engine import Engine, generate
from inflight.errors import ConfigError
from inflight.execution import cuda_runner, launch_recording
from inflight.execution import factory as runners
from inflight.execution.batch.device_batch import SubmittedStep
from inflight.execution.cuda_runner import CudaRunner
from inflight.execution.device_steps import DeviceSteps
from inflight.execution.launch_recording import find_kernels
from inflight.models.decoder_cuda import DecoderSettings
from inflight.models.registry import read_spec
from inflight.models.spec import ModelSpec
from inflight.sampling.params import SamplingParams
from inflight_kernels import ops
from inflight_kernels.ops.attention import planning
from inflight_kernels.ops.attention.operands import AttentionMetadata
from inflight_kernels.runtime.recording import Launched
from inflight_kernels.runtime.recording import launched as recorded
from thinned import thinned

Ahead = list[tuple[str, str]]

SHAPES = Path(__file__).parents[3] / "benchmarks/models"
Record = Callable[..., tuple[Launched, Ahead]]


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Iterator[Record]:
    """Records launches for a GPU -> those, and the kernels whose compilation begins ahead."""
    ahead: Ahead = []
    monkeypatch.setattr(cuda_runner, "precompile_kernels", ahead.extend)
    with contextlib.ExitStack() as stack:

        def start(**gpu: Any) -> tuple[Launched, Ahead]:
            return stack.enter_context(recorded_launches.recording(monkeypatch, **gpu)), ahead

        yield start


def test_without_a_gpu_the_error_says_so(
    tiny_llama: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = EngineConfig(model=".", device="cuda")
    with pytest.raises(ConfigError, match="no CUDA device"):
        CudaRunner(config, tiny_llama, read_spec(tiny_llama), lambda what, fraction: None)


# ---------------------------------------------------------------- what is recorded


def count_replays(monkeypatch: pytest.MonkeyPatch) -> list[StepSize | SubmittedStep]:
    """What the graphs were captured with that are replayed from now on, in order."""
    replayed: list[StepSize | SubmittedStep] = []

    class Counted(host_kernels.Recorded):
        def __init__(self, pool: object, launch: Any, captured: Any) -> None:
            def counting() -> None:
                replayed.append(captured)
                launch(captured)

            super().__init__(pool, counting)

    monkeypatch.setattr(cuda_runner, "capture_graph", Counted)
    return replayed


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_steps_with_prompts_are_replayed(
    tmp_path: Path, cuda_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    host_kernels.install(monkeypatch)
    checkpoint = tiny.write_llama(tmp_path, head_dim=64)
    replayed = count_replays(monkeypatch)
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 1024, "num_blocks": 80}
    config = EngineConfig(
        model=str(checkpoint.path), device="cuda", cuda_graphs=cuda_graphs, **settings
    )
    shape = read_spec(checkpoint)
    runner = CudaRunner(config, checkpoint, shape, lambda what, fraction: None)
    generator = random.Random(0)
    prompts = [generator.choices(range(3, 90), k=k) for k in (40, 70, 200, 200, 200)]
    greedy = SamplingParams(temperature=0.0)

    def make_sequence(index: int) -> Sequence:
        sequence = Sequence(Request(index, prompts[index], greedy), 1 << 20)
        tiny.own(sequence, list(range(16 * index, 16 * index + 16)))
        return sequence

    sequences = [make_sequence(index) for index in range(len(prompts))]
    first, second, *long = sequences
    tiny.step(runner, [tiny.next_chunk(first)])
    tiny.step(runner, [tiny.next_chunk(first), tiny.next_chunk(second)])
    tiny.step(runner, [tiny.next_chunk(sequence) for sequence in (first, second, *long)])
    tiny.step(runner, [tiny.next_chunk(sequence) for sequence in sequences])
    expected = [StepSize(64, 1, 1, 64), StepSize(96, 8, 8, 96)]
    expected += [StepSize(640, 8, 8, 640), StepSize(8, 8, 8, 1)]
    assert replayed == (expected if cuda_graphs else [])
    on_cpu = runners.build(
        EngineConfig(model=str(checkpoint.path), num_blocks=80, num_threads=1),
        checkpoint,
        lambda what, fraction: None,
    )[0]
    for index, sequence in enumerate(sequences):
        output = sequence.token_ids[len(prompts[index]) :]
        assert tiny.generate(on_cpu, [make_sequence(index)], len(output)) == [output]


@pytest.mark.parametrize("speculation", [0, 2, AUTO_DRAFTS])
def test_sampling_is_replayed_where_drafting_follows(
    tmp_path: Path, speculation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    host_kernels.install(monkeypatch)
    checkpoint = tiny.write_llama(tmp_path, head_dim=64)
    replayed = count_replays(monkeypatch)
    config = EngineConfig(
        model=str(checkpoint.path),
        device="cuda",
        max_num_seqs=4,
        num_blocks=80,
        speculative_config=SpeculativeConfig(method="ngram"),
    )
    runner, model = runners.build(config, checkpoint, lambda what, fraction: None)
    engine = Engine(config, runner, model.max_model_len(config), ())
    params = SamplingParams(max_tokens=12, temperature=0.0)
    generate(engine, [Request(1, [7, 8, 9] * 4, params, speculation=speculation)])
    sampled = [sent for sent in replayed if isinstance(sent, SubmittedStep)]
    assert bool(sampled) == bool(speculation)
    assert all(sent.is_plain for sent in sampled)


# ---------------------------------------------------------------- what there is memory for


@pytest.mark.parametrize("max_num_seqs", [1, 2])
@pytest.mark.parametrize("heads", [(32, 8), (16, 8), (32, 32)], ids=str)
@pytest.mark.parametrize("hopper", [False, True])
def test_every_step_finds_its_workspace(
    max_num_seqs: int,
    heads: tuple[int, int],
    hopper: bool,
    tmp_path: Path,
    record: Record,
) -> None:
    """Also where one sequence runs alone, whose kernel depends on how much of it comes at once."""
    record(hopper=hopper)
    num_heads, num_kv_heads = heads
    shape = LLAMA_8B | {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads}
    (tmp_path / "config.json").write_text(json.dumps(tiny.SETTINGS | shape))
    config = EngineConfig(
        model=str(tmp_path),
        device="cuda",
        random_weights=True,
        num_blocks=64,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=512,
    )
    runner, _ = runners.build(config, locate(config.model), lambda what, fraction: None)
    for length in (1, 3, 9, 17, 33, 65, 512):
        sequence = tiny.make_sequence([5] * length, list(range(32)), SamplingParams())
        runner.launch(Batch([tiny.next_chunk(sequence)]))
        runner.forget(sequence)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.long] * (seed >= 24)) for seed in range(60)]
)
def test_whatever_a_config_allows_starts_and_runs(
    seed: int, tmp_path: Path, record: Record
) -> None:
    draw = random.Random(seed)
    gpu = {"hopper": draw.random() < 0.6, "num_multiprocessors": draw.choice([132, 114, 108, 78])}
    shared_kib = 228 if gpu["hopper"] else (228, 164, 100)[seed % 3]
    launched, ahead = record(**gpu, shared_kib=shared_kib)
    num_kv_heads, max_len = draw.choice([1, 2, 3, 5, 8, 32]), draw.choice([128, 2048, 4096])
    shape = {
        "vocab_size": draw.choice([1000, 32064, 49152, 128256]),
        "hidden_size": draw.choice([256, 264, 576, 2048, 4096]),
        "intermediate_size": draw.choice([512, 1000, 1536, 14336]),
        "num_hidden_layers": 2,
        "num_attention_heads": num_kv_heads * draw.choice([1, 2, 3, 4, 7, 8, 16]),
        "num_key_value_heads": num_kv_heads,
        "head_dim": draw.choice([64, 96, 128, 256]),
        "max_position_embeddings": max_len,
        "tie_word_embeddings": draw.random() < 0.3,
        "attention_bias": draw.random() < 0.2,
        "mlp_bias": draw.random() < 0.2,
    }
    (tmp_path / "config.json").write_text(json.dumps(tiny.SETTINGS | shape))
    speculation = SpeculativeConfig(num_speculative_tokens=draw.choice([1, 5, 16]))
    max_num_batched_tokens = draw.choice([1, 2, 7, 64, 300, 2048, 8192])
    config = EngineConfig(
        model=str(tmp_path),
        device="cuda",
        random_weights=True,
        num_blocks=draw.choice([None, 9, 64]),
        block_size=draw.choice([16, 32, 64]),
        max_num_seqs=min(max_num_batched_tokens, draw.choice([1, 2, 5, 64, 128, 200, 256, 1000])),
        max_num_batched_tokens=max_num_batched_tokens,
        cuda_graphs=draw.random() < 0.8,
        batch_invariant=draw.random() < 0.25,
        speculative_config=speculation if draw.random() < 0.4 else None,
    )
    runner, _ = runners.build(config, locate(config.model), lambda what, fraction: None)
    blocks = list(range(min(runner.num_blocks, max_len // config.block_size)))
    for _ in range(5):
        lengths = [1] * draw.randint(1, min(5, config.max_num_seqs))
        room = min(max_num_batched_tokens, max_len - 10, len(blocks) * config.block_size)
        lengths[0] += draw.randint(0, room - len(lengths))
        sequences = [tiny.make_sequence([5] * k, blocks, SamplingParams()) for k in lengths]
        runner.launch(Batch([tiny.next_chunk(sequence) for sequence in sequences]))
        for sequence in sequences:
            sequence.generation += 1  # it has gone
    assert set(launched) <= set(ahead)


def shape_runner(shape: str, folder: Path, **settings: Any) -> tuple[Any, ModelSpec]:
    """A runner of random weights at the shape of a real model, and what describes the model.

    Where weights are quantized, which takes a second for each few layers, it has fewer of them.
    """
    model = SHAPES / shape
    if "quantization" in settings and settings["quantization"] != "none":
        given = json.loads((model / "config.json").read_text())
        given["num_hidden_layers"] = 6
        if "layer_types" in given:
            given["layer_types"] = given["layer_types"][:6]
        model = folder / shape
        model.mkdir()
        (model / "config.json").write_text(json.dumps(given))
    config = EngineConfig(
        model=str(model),
        device="cuda",
        random_weights=True,
        max_model_len=8192,
        **settings,
    )
    return runners.build(config, locate(config.model), lambda what, fraction: None)


def test_gemma_3_12b_starts_and_runs_with_two_block_tables_on_an_h200(
    tmp_path: Path, record: Record
) -> None:
    launched, ahead = record()
    runner, spec = shape_runner("gemma-3-12b", tmp_path)
    assert runner.kv_tables.spans == (80, 16)
    layout = spec.kv_layout("bfloat16", frees_windows=True)
    assert runner.num_blocks * layout.block_bytes(16) > 90 << 30
    # All sequences that decode at 8,192 tokens, and one that is admitted.
    kept = runner.kv_tables.num_kept_blocks(8192)
    assert runner.num_blocks - runner.kv_tables.num_blocks(8192) > 110 * kept
    for length in (1, 17, 500, 3000):
        sequence = Sequence(Request(0, [5] * length, SamplingParams()), 100)
        sequence.tables = [list(range(103)), list(range(200, 712))]
        sequence.capacity = 8192
        runner.launch(Batch([tiny.next_chunk(sequence)]))
        sequence.generation += 1
    assert set(launched) <= set(ahead)


@pytest.mark.parametrize(
    "settings",
    [{}, {"quantization": "fp8", "kv_cache_dtype": "fp8"}, {"batch_invariant": True}],
    ids=["bfloat16", "fp8", "batch-invariant"],
)
def test_gpt_oss_20b_starts_and_runs_with_two_block_tables_on_an_h200(
    tmp_path: Path, record: Record, settings: dict[str, Any]
) -> None:
    """Its hidden size, 2880, is no multiple of what kernels multiply at once."""
    launched, ahead = record()
    runner, _ = shape_runner("gpt-oss-20b", tmp_path, **settings)
    assert runner.kv_tables.spans == (16, 16)
    launch_steps(runner, [list(range(512)), list(range(512, 1024))])
    assert set(launched) <= set(ahead) <= COMPILED
    stems = {stem for stem, _ in launched}
    assert {"attention", "experts_hopper", "route", "rows"} <= stems
    assert ("attention_hopper" in stems) == (not settings.get("batch_invariant"))
    assert ("few_experts_hopper" in stems) == (not settings.get("batch_invariant"))


def test_the_second_plan_of_a_step_starts_beside_the_first(
    tmp_path: Path, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of layers with a window, whose lengths are there when the first plan starts."""
    record()
    runner, _ = shape_runner("gpt-oss-20b", tmp_path)
    ready: list[bool] = []
    plan = planning.plan

    def recording(metadata: AttentionMetadata, *, history_ready: bool, pdl: bool) -> None:
        ready.append(history_ready)
        plan(metadata, history_ready=history_ready, pdl=pdl)

    monkeypatch.setattr(planning, "plan", recording)
    sequence = Sequence(Request(0, [5], SamplingParams()), 100)
    sequence.tables = [list(range(512)), list(range(512, 1024))]
    sequence.capacity = 8192
    runner.launch(Batch([tiny.next_chunk(sequence)]))
    assert ready == [False, True]


def test_experts_in_mxfp4_have_kernels_for_their_codes(tmp_path: Path, record: Record) -> None:
    shape = family.SHAPE | {"head_dim": 64, "num_local_experts": 8, "num_experts_per_tok": 2}
    model = family.make(GptOssConfig(**shape, pad_token_id=0, sliding_window=family.WINDOW))
    grouped_folders.write_mxfp4(model, tmp_path)
    launched, ahead = record()
    config = EngineConfig(model=str(tmp_path), device="cuda", max_model_len=8192)
    runner, _ = runners.build(config, locate(config.model), lambda what, fraction: None)
    launch_steps(runner, [list(range(512)), list(range(512, 1024))])
    assert set(launched) <= set(ahead) <= COMPILED
    products = {name for stem, name in launched if stem == "experts_hopper"}
    assert products
    assert all(name.startswith("experts_product_codes<") for name in products), products


def launch_steps(runner: Any, tables: list[list[int]]) -> None:
    """Steps of decodes and of prompts, of sequences with these block tables."""
    for chunks, length in ((1, 1), (2, 1), (200, 1), (1, 17), (1, 100), (1, 500), (1, 3000)):
        sequences = []
        for index in range(chunks):
            sequence = Sequence(Request(index, [5] * length, SamplingParams()), 100)
            sequence.tables = tables
            sequence.capacity = 8192
            sequences.append(sequence)
        runner.launch(Batch([tiny.next_chunk(sequence) for sequence in sequences]))
        for sequence in sequences:
            sequence.generation += 1  # it has gone


@pytest.mark.parametrize(
    ("model", "quantization", "batch_invariant"),
    thinned(
        ["qwen3-30b-a3b", "deepseek-v2-lite"],
        ["none", "fp8"],
        [pytest.param(True, id="batch-invariant"), pytest.param(False, id="fast")],
        one_in=2,
    ),
)
def test_mixtures_start_and_run_on_an_h200(
    tmp_path: Path, record: Record, model: str, quantization: Any, batch_invariant: bool
) -> None:
    launched, ahead = record()
    runner, spec = shape_runner(
        model, tmp_path, quantization=quantization, batch_invariant=batch_invariant
    )
    launch_steps(runner, [list(range(512))])
    assert set(launched) <= set(ahead) <= COMPILED
    stems = {stem for stem, _ in launched}
    assert {"experts_hopper", "route", "rows"} <= stems
    assert ("latent_attention" in stems) == (spec.layers[0].attention.latent is not None)
    assert ("few_experts_hopper" in stems) == (not batch_invariant)
    assert ("few_scores_hopper" in stems) == (not batch_invariant)
    names = " ".join(name for _, name in launched)
    assert ("summing_skinny_gemm" in names) == (not batch_invariant and quantization == "fp8")
    assert ("norm_few_gemm" in names) == (not batch_invariant and quantization == "none")


@pytest.mark.parametrize(
    ("model", "kv_dtype", "cached"),
    thinned(
        ["gemma-3-12b", "llama-3.1-8b"],
        [pytest.param("fp8", "Fp8", id="fp8"), pytest.param("int8", "Int8", id="int8")],
        one_in=2,
    ),
)
def test_a_kv_cache_of_8_bits_has_kernels_and_twice_the_room(
    tmp_path: Path, record: Record, model: str, kv_dtype: Any, cached: str
) -> None:
    launched, ahead = record()
    runner, spec = shape_runner(
        model, tmp_path, kv_cache_dtype=kv_dtype, gpu_memory_utilization=0.9
    )
    frees_windows = len(runner.kv_tables.tables) > 1
    layout = spec.kv_layout(kv_dtype, frees_windows=frees_windows)
    wider = spec.kv_layout("bfloat16", frees_windows=frees_windows)
    assert runner.num_blocks * layout.block_bytes(16) > 80 << 30
    assert 1.93 < wider.block_bytes(16) / layout.block_bytes(16) < 2
    for chunks in (1, 2, 200):  # of one token, the first of them with a shared block that is copied
        rows = [tiny.make_sequence([5, 6], [1 + i]) for i in range(chunks)]
        for row in rows:
            row.tables = [[1 + row.request_id] for _ in runner.kv_tables.tables]
            row.num_computed = 1
        runner.launch(Batch([tiny.next_chunk(row) for row in rows], [(0, 1)]))
    for length in (17, 500, 3000):
        sequence = Sequence(Request(0, [5] * length, SamplingParams()), 100)
        sequence.tables = [list(range(200)), list(range(200, 712))][: len(runner.kv_tables.tables)]
        sequence.capacity = 8192
        runner.launch(Batch([tiny.next_chunk(sequence)]))
        sequence.generation += 1
    assert set(launched) <= set(ahead)
    users = {"attention", "attention_heads", "attention_dequantize", "rope"}
    found = {(stem, name) for stem, name in launched if stem in users}
    # Long prompts are dequantised for a kernel that reads 16 bits.
    stems = {stem for stem, _ in launched}
    has_hopper_kernel = model == "llama-3.1-8b"
    assert ("attention_dequantize" in stems) == ("attention_hopper" in stems) == has_hopper_kernel
    assert len(found) > 2 and all(cached in name for _, name in found)
    # Gemma's heads have 256 values.
    assert any("rope_attend" in name for _, name in found) == (model == "llama-3.1-8b")


def test_steps_of_one_token_leave_no_room_for_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host_kernels.install(monkeypatch)
    checkpoint = tiny.write_llama(tmp_path, head_dim=64)
    settings = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "num_blocks": 8}
    prompt = [7, 8, 9, 7, 8, 9, 7]
    found = []
    for device, speculation in (("cuda", SpeculativeConfig()), ("cpu", None)):
        config = EngineConfig(
            model=str(checkpoint.path), device=device, speculative_config=speculation, **settings
        )
        runner, model = runners.build(config, checkpoint, lambda what, fraction: None)
        engine = Engine(config, runner, model.max_model_len(config), ())
        request = Request(1, prompt, SamplingParams(max_tokens=12, temperature=0.0))
        found.append(generate(engine, [request]))
        assert engine.stats().num_drafted_tokens == 0
    assert found[0] == found[1]


# ---------------------------------------------------------------- what is compiled ahead

# Llama 3.1 8B, but for the number of its layers.
LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
}
SMALL_LLAMA = LLAMA_8B | {"hidden_size": 2048, "num_hidden_layers": 1, "head_dim": 64}
HEAD = LLAMA_8B | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": 32000,
}
OTHERS: dict[str, dict[str, Any]] = {
    "biases": {"attention_bias": True, "mlp_bias": True},
    "heads-of-64": {"hidden_size": 2048, "head_dim": 64, "tie_word_embeddings": True},
    "heads-of-96": {"hidden_size": 3072, "head_dim": 96, "num_key_value_heads": 32},
    "heads-of-256": {"hidden_size": 2304, "head_dim": 256, "num_attention_heads": 8},
    "columns-not-for-us": {"hidden_size": 264, "intermediate_size": 1000},
}
# Kernels that tests compile, each for itself.
COMPILED = {
    (stem, name)
    for module in pkgutil.walk_packages(ops.__path__, "inflight_kernels.ops.")
    for stem, names, _ in getattr(importlib.import_module(module.name), "instantiations", list)()
    for name in names
}
DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {},
    "suffix": {},
    "self": {"num_layers": 1},
    "draft_model": {"model": "small"},
    "eagle3": {"model": "head"},
}


@pytest.mark.parametrize(
    ("changes", "drafter", "settings", "hopper"),
    thinned(
        [
            pytest.param({}, None, {}, id="llama"),
            pytest.param({}, None, {"batch_invariant": True}, id="batch-invariant"),
            *(pytest.param(changes, None, {}, id=name) for name, changes in OTHERS.items()),
            *(pytest.param({}, name, {"max_num_seqs": 64}, id=name) for name in DRAFTERS),
            pytest.param({}, None, {"quantization": "fp8"}, id="fp8"),
        ],
        [pytest.param(True, id="hopper"), pytest.param(False, id="others")],
        one_in=2,
    ),
)
def test_all_launched_kernels_are_precompiled(
    changes: dict[str, Any],
    drafter: str | None,
    settings: dict[str, Any],
    hopper: bool,
    tmp_path: Path,
    record: Record,
) -> None:
    launched, ahead = record(hopper=hopper)
    shapes = {"model": LLAMA_8B | changes, "small": SMALL_LLAMA, "head": HEAD}
    for name, shape in shapes.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(tiny.SETTINGS | shape))
    speculation = None
    if drafter is not None:
        given = DRAFTERS[drafter]
        if "model" in given:
            given = {"model": str(tmp_path / given["model"])}
        speculation = SpeculativeConfig(method=drafter, **given)
    config = EngineConfig(
        model=str(tmp_path / "model"),
        device="cuda",
        random_weights=True,
        num_blocks=1024,
        speculative_config=speculation,
        **settings,
    )
    runner, _ = runners.build(config, locate(config.model), lambda what, fraction: None)
    at_start = set(launched)
    assert at_start <= set(ahead) <= COMPILED

    prompts = [random.Random(i).choices(range(3, 160), k=20 + 200 * i) for i in range(3)]
    params = SamplingParams(
        max_tokens=8, top_p=0.9, typical_p=0.9, repetition_penalty=1.1, num_logprobs=3
    )
    sequences = [
        tiny.make_sequence(prompt, list(range(1 + 64 * i, 65 + 64 * i)), params)
        for i, prompt in enumerate(prompts)
    ]
    runner.launch(Batch([tiny.next_chunk(sequence) for sequence in sequences], [(1, 2)]))
    assert set(launched) > at_start
    assert set(launched) <= set(ahead)


@pytest.mark.parametrize("kv_cache", ["auto", "fp8"])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_the_kernels_that_quantise_attention_are_found_if_some_step_has_them(
    tmp_path: Path, record: Record, batch_invariant: bool, kv_cache: KVDtype
) -> None:
    record(hopper=True)
    (tmp_path / "config.json").write_text(json.dumps(tiny.SETTINGS | LLAMA_8B))
    config = EngineConfig(model=str(tmp_path), device="cuda", random_weights=True)
    checkpoint = locate(config.model)
    settings = DecoderSettings(
        *(torch.bfloat16, torch.device("meta"), 4096, 8192, 256, batch_invariant, "fp8", kv_cache)
    )
    found = set(find_kernels(config, checkpoint, read_spec(checkpoint), None, settings))
    assert ("quantization", "quantize_rows<Fp8, __nv_bfloat16, 1>") in found
    quantizing = {
        ("attention_hopper", "attend_quantizing<attention::HopperShape<__nv_bfloat16, 128>>"),
        ("quantization", "settle_parts<__nv_bfloat16>"),
    }
    assert found & quantizing == (set() if batch_invariant else quantizing)


def test_a_recording_that_fails_costs_a_warning_and_not_the_start(
    tmp_path: Path,
    record: Record,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*step: object) -> None:
        raise RuntimeError("no such operation on the meta device")

    with_all, ahead = record()
    monkeypatch.setattr(launch_recording, "_run", fail)
    (tmp_path / "config.json").write_text(json.dumps(tiny.SETTINGS | SMALL_LLAMA))
    config = EngineConfig(model=str(tmp_path), device="cuda", random_weights=True, num_blocks=64)
    with caplog.at_level(logging.WARNING):
        runners.build(config, locate(config.model), lambda what, fraction: None)
    assert not ahead
    assert "no such operation" in caplog.text
    assert recorded() is with_all, "the failed recording still takes note"
    assert ("sampling_gather", "gather<float>") in with_all


def test_a_shape_that_gpus_do_not_support_is_still_a_setting_s_error(
    tmp_path: Path, record: Record, caplog: pytest.LogCaptureFixture
) -> None:
    record()
    (tmp_path / "config.json").write_text(json.dumps(tiny.SETTINGS | {"head_dim": 16}))
    config = EngineConfig(model=str(tmp_path), device="cuda", random_weights=True, num_blocks=64)
    with pytest.raises(ConfigError, match="head_dim 16"):
        runners.build(config, locate(config.model), lambda what, fraction: None)
    assert not caplog.records


def test_finding_the_kernels_reads_no_weight_and_is_over_at_once(
    tmp_path: Path, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[StepSize] = []
    forward = DeviceSteps.forward

    def counted(steps: DeviceSteps, size: StepSize) -> None:
        assert steps.model.spec.num_layers <= 2, "layers of one kind are run again and again"
        sizes.append(size)
        forward(steps, size)

    record()
    monkeypatch.setattr(DeviceSteps, "forward", counted)
    shape = LLAMA_8B | {"num_hidden_layers": 32}
    (tmp_path / "config.json").write_text(json.dumps(tiny.SETTINGS | shape))
    config = EngineConfig(model=str(tmp_path), device="cuda")  # no weights are in the folder
    checkpoint = Checkpoint(tmp_path, "huggingface")
    settings = DecoderSettings(torch.bfloat16, torch.device("meta"), 4096, 8192, 256)
    assert find_kernels(config, checkpoint, read_spec(checkpoint), None, settings)
    assert 0 < len(sizes) < 400


def test_a_recording_imports_no_compiler_of_torch(tmp_path: Path) -> None:
    """Some operations on the meta device do, and the start would wait for that for seconds."""
    shapes = {"model": LLAMA_8B, "small": SMALL_LLAMA, "head": HEAD}
    for name, shape in shapes.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(tiny.SETTINGS | shape))
    given = {method: dict(settings) for method, settings in DRAFTERS.items()}
    for settings in given.values():
        if "model" in settings:
            settings["model"] = str(tmp_path / settings["model"])
    ended = subprocess.run(
        [sys.executable, "-c", _RECORD_ALL, str(tmp_path / "model"), json.dumps(given)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert sorted(found["kernels"]) == sorted(DRAFTERS)
    assert all(found["kernels"].values())
    assert not found["imported"]


_RECORD_ALL = """
import json, sys
import pytest
import recorded_launches
from inflight.checkpoint.locate import locate
from inflight.config import EngineConfig, KVDtype, SpeculativeConfig
from inflight.execution import cuda_runner, factory
kernels = {}
for method, given in json.loads(sys.argv[2]).items():
    config = EngineConfig(
        model=sys.argv[1], device="cuda", random_weights=True, num_blocks=64, max_num_seqs=64,
        speculative_config=SpeculativeConfig(method=method, **given),
    )
    class Found(Exception):
        pass
    def found(ahead):
        kernels[method] = len(ahead)
        raise Found
    with pytest.MonkeyPatch.context() as patch, recorded_launches.recording(patch):
        patch.setattr(cuda_runner, "precompile_kernels", found)
        try:
            factory.build(config, locate(config.model), lambda what, fraction: None)
        except Found:
            pass
compilers = [name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules]
print(json.dumps({"kernels": kernels, "imported": compilers}))
"""
