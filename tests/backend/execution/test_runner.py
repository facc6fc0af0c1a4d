"""A sequence's tokens depend only on its own options and seed; a failure affects no other one."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import tiny
from inflight.checkpoint.locate import Checkpoint
from inflight.config import EngineConfig
from inflight.errors import ConfigError
from inflight.execution.cpu_runner import CpuRunner
from inflight.execution.echo_runner import EchoRunner
from inflight.execution.factory import build, resolve_device
from inflight.execution.runner import Runner
from inflight.sampling.params import SamplingParams

PROMPT = [5, 17, 99, 3, 150, 42]


@pytest.fixture(scope="module")
def runner(tiny_llama: Checkpoint) -> Runner:
    return tiny.make_runner(tiny_llama)


def text(
    runner: Runner,
    prompt: list[int] = PROMPT,
    num_tokens: int = 12,
    fields: dict[str, Any] | None = None,
    **params: Any,
) -> list[int]:
    """What follows a prompt that is alone in its batches."""
    sequence = tiny.make_sequence(
        prompt, list(range(20)), SamplingParams(**params), **(fields or {})
    )
    return tiny.generate(runner, [sequence], num_tokens)[0]


# ---------------------------------------------------------------- batches


def test_batched_sequences_match_single_ones(runner: Runner) -> None:
    """Greedy and seeded ones, with different filters, joining at different times."""
    options = [
        (SamplingParams(), 0),
        (SamplingParams(seed=1), 1),
        (SamplingParams(temperature=1.5, top_p=0.9), 2),
        (SamplingParams(temperature=0.9, top_k=7), 3),
        (SamplingParams(temperature=2.0, min_p=0.05), 4),
        (SamplingParams(seed=9, repetition_penalty=1.4, frequency_penalty=0.5), 9),
    ]
    prompts = [[(11 * i + 7 * j + 1) % 160 for j in range(3 + 4 * i)] for i in range(len(options))]
    alone = [
        tiny.generate(runner, [tiny.make_sequence(prompt, list(range(20)), params, seed=seed)], 15)[
            0
        ]
        for prompt, (params, seed) in zip(prompts, options, strict=True)
    ]
    free = list(range(63, -1, -1))
    sequences = [
        tiny.make_sequence(prompt, [free.pop() for _ in range(10)], params, seed=seed)
        for prompt, (params, seed) in zip(prompts, options, strict=True)
    ]
    running: list[Any] = []
    waiting = list(sequences)
    while any(sequence.num_output_tokens < 15 for sequence in sequences):
        if waiting:
            running.append(waiting.pop())
        chunks = [tiny.next_chunk(sequence, most=6) for sequence in running]
        tiny.step(runner, chunks)
    together = [sequence.token_ids[sequence.num_prompt_tokens :][:15] for sequence in sequences]
    assert together == alone


def test_a_chunk_before_the_end_of_the_prompt_samples_nothing(runner: Runner) -> None:
    one = tiny.make_sequence(PROMPT, [0, 1])
    two = tiny.make_sequence(PROMPT, [2, 3])
    output = tiny.run(runner, [tiny.chunk(one, 0, 4), tiny.chunk(two, 0, 6)])
    assert output.token_ids[0] == output.logprobs[0] == []
    assert len(output.token_ids[1]) == len(output.logprobs[1]) == 1
    assert tiny.run(runner, [tiny.chunk(one, 4, 1)]).token_ids == [[]]


def test_an_empty_batch_is_no_work(runner: Runner) -> None:
    output = tiny.run(runner, [])
    assert (output.token_ids, output.logprobs, output.errors) == ([], [], {})


def test_blocks_are_copied_before_the_step(runner: Runner) -> None:
    """A copy of a shared, partly filled block continues as the original does."""
    whole = tiny.make_sequence(PROMPT, [8, 9])
    (expected,) = tiny.generate(runner, [whole], 8 - len(PROMPT))
    copy = tiny.make_sequence(PROMPT, [20, 21])
    copy.num_computed = 5
    output = tiny.run(runner, [tiny.chunk(copy, 5, 1)], copies=[(8, 20), (9, 21)])
    assert output.token_ids[0] == expected[:1]


def test_logprobs_are_the_models_own(runner: Runner, tiny_llama: Checkpoint) -> None:
    """Before penalties, masks and temperature."""
    model = AutoModelForCausalLM.from_pretrained(tiny_llama.path, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)
    for params in (
        SamplingParams(),
        SamplingParams(temperature=3.0, repetition_penalty=5.0, presence_penalty=1.0, min_tokens=3),
    ):
        sequence = tiny.make_sequence(
            PROMPT, [0, 1], params, seed=4, eos_token_ids=frozenset({int(expected.argmax())})
        )
        output = tiny.run(runner, [tiny.chunk(sequence, 0, len(PROMPT))])
        token = output.token_ids[0][0]
        assert output.logprobs[0][0] == pytest.approx(float(expected[token]), abs=1e-4)


# ---------------------------------------------------------------- options


def test_the_same_seed_reproduces_the_text_and_another_does_not(runner: Runner) -> None:
    texts = [text(runner, fields={"seed": seed}, temperature=2.0) for seed in (7, 7, 8)]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_a_recomputed_sequence_samples_the_same_tokens(runner: Runner) -> None:
    """After a preemption the output is computed anew as if it were prompt."""
    params = SamplingParams(temperature=2.0, presence_penalty=1.0)
    whole = text(runner, fields={"seed": 5}, temperature=2.0, presence_penalty=1.0)
    sequence = tiny.make_sequence(PROMPT, list(range(20)), params, seed=5)
    tiny.generate(runner, [sequence], 6)
    sequence.num_computed = 0
    tiny.own(sequence, list(range(30, 50)))
    tiny.generate(runner, [sequence], 6)
    assert sequence.token_ids[len(PROMPT) :] == whole


def test_top_k_of_one_and_a_tiny_nucleus_are_greedy(runner: Runner) -> None:
    greedy = text(runner)
    assert text(runner, temperature=0.0) == greedy
    assert text(runner, temperature=1e-9) == greedy
    assert text(runner, temperature=1.0, top_k=1) == greedy
    assert text(runner, temperature=1.0, top_p=1e-9) == greedy


def test_bad_words_never_occur_in_the_output(runner: Runner) -> None:
    plain = text(runner)
    assert plain[0] not in text(runner, fields={"bad_word_ids": ((plain[0],),)})
    pair = (plain[2], plain[3])
    other = text(runner, fields={"bad_word_ids": (pair,)})
    assert other[:3] == plain[:3]
    assert pair not in list(itertools.pairwise(other))
    # Its last token alone stays allowed, and so does a word that began in the prompt.
    assert other[3] != plain[3]
    assert text(runner, fields={"bad_word_ids": ((PROMPT[-1], plain[0]),)})[0] == plain[0]


def test_bad_words_outside_the_vocabulary_change_nothing(runner: Runner) -> None:
    fields = {"bad_word_ids": ((160,), (10**9,), ()), "eos_token_ids": frozenset({5000})}
    assert text(runner, fields=fields, min_tokens=5) == text(runner)


def test_no_end_of_sequence_before_min_tokens(runner: Runner) -> None:
    plain = text(runner)
    ends = frozenset({plain[0], plain[4]})
    fields = {"eos_token_ids": ends}
    assert text(runner, fields=fields) == plain
    held = text(runner, fields=fields, min_tokens=8)
    assert not ends & set(held[:8])
    assert text(runner, fields=fields, ignore_eos=True) == plain  # it does not stop, that is all


def test_penalties_stop_repetition(runner: Runner) -> None:
    """A frequency penalty of 2 on logits of this size ends what greedy repeats."""
    prompt = [9, 9, 9]
    plain = text(runner, prompt, 60)
    calm = text(runner, prompt, 60, frequency_penalty=2.0, presence_penalty=2.0)
    assert len(set(calm)) > len(set(plain))
    again = [text(runner, prompt, 1)[0], *prompt]
    repeated = text(runner, again, 1)
    assert text(runner, [*repeated, *again], 1, repetition_penalty=10.0)[0] not in again


# ---------------------------------------------------------------- failures


@pytest.fixture(scope="module", params=["auto", "fp8", "int8"])
def fragile(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """A model that has no number for token 77, and infinity for 78."""
    weights = tiny.random_weights(tiny.SETTINGS)
    weights["model.embed_tokens.weight"][77] = float("nan")
    weights["model.embed_tokens.weight"][78] = float("inf")
    folder: Path = tmp_path_factory.mktemp("fragile")
    return tiny.make_runner(tiny.write_llama(folder, weights), kv_cache_dtype=request.param)


@pytest.mark.parametrize("bad", [77, 78])
def test_a_sequence_without_numbers_fails_alone(fragile: Runner, bad: int) -> None:
    healthy = tiny.make_sequence(PROMPT, [0, 1])
    expected = tiny.run(fragile, [tiny.chunk(healthy, 0, 6)])
    broken = tiny.make_sequence([5, bad, 9], [2])
    output = tiny.run(fragile, [tiny.chunk(broken, 0, 3), tiny.chunk(healthy, 0, 6)])
    assert list(output.errors) == [0]
    assert output.errors[0].startswith("numerical: ")
    assert output.token_ids == [[], expected.token_ids[0]]
    assert output.logprobs[1] == pytest.approx(expected.logprobs[0], abs=1e-4)


@pytest.mark.parametrize("copied", [False, True])
def test_blocks_of_a_broken_sequence_do_not_break_the_next(fragile: Runner, copied: bool) -> None:
    """Its NaN stand in slots past the end of a sequence that takes the blocks over."""
    fresh = tiny.make_sequence(PROMPT[:2], [9])
    expected = tiny.generate(fragile, [fresh], 2)[0]
    broken = tiny.make_sequence([77] * 16, [0, 1, 2, 3])
    assert 0 in tiny.run(fragile, [tiny.chunk(broken, 0, 16)]).errors
    after = tiny.make_sequence(PROMPT[:2], [2])
    # A longer row beside it, so that it is padded and masked.
    long = tiny.make_sequence(PROMPT, [6, 7])
    if copied:
        tiny.generate(fragile, [long], 1)
    if copied:
        # The first token's KV is right, the rest of the block it is copied from is not.
        shared = tiny.make_sequence([PROMPT[0], 77, 77, 77], [5])
        tiny.run(fragile, [tiny.chunk(shared, 0, 1)])
        tiny.run(fragile, [tiny.chunk(shared, 1, 3)])
        after.num_computed = 1
        output = tiny.run(
            fragile, [tiny.chunk(after, 1, 1), tiny.chunk(long, 6, 1)], copies=[(5, 2)]
        )
        assert output.token_ids[0] == expected[:1]
    else:
        assert tiny.generate(fragile, [after, long], 2)[0] == expected


def test_a_sequence_with_all_tokens_banned_fails_alone(runner: Runner) -> None:
    everything = tuple((i,) for i in range(160))
    stuck = tiny.make_sequence(PROMPT, [0, 1], bad_word_ids=everything)
    drawn = tiny.make_sequence(
        PROMPT, [2, 3], SamplingParams(temperature=1.0), bad_word_ids=everything
    )
    healthy = tiny.make_sequence(PROMPT, [4, 5])
    output = tiny.run(runner, [tiny.chunk(s, 0, 6) for s in (stuck, healthy, drawn)])
    assert set(output.errors) == {0, 2}
    assert all("leave no token" in error for error in output.errors.values())
    assert [len(ids) for ids in output.token_ids] == [0, 1, 0]


@pytest.mark.parametrize("unknown", [160, -1, 10**12])
def test_a_token_outside_the_vocabulary_is_an_error_of_that_sequence(
    runner: Runner, unknown: int
) -> None:
    healthy = tiny.make_sequence(PROMPT, [4, 5])
    chunks = [
        tiny.chunk(tiny.make_sequence([1, 2], [0]), 0, 1),
        tiny.chunk(tiny.make_sequence([1, unknown, 2], [1]), 0, 3),
        tiny.chunk(healthy, 0, 6),
    ]
    output = tiny.run(runner, chunks)
    assert list(output.errors) == [1]
    assert "outside the model's vocabulary" in output.errors[1]
    assert [len(ids) for ids in output.token_ids] == [0, 0, 1]


# ---------------------------------------------------------------- building


def test_build_gives_the_runner_of_the_device(tiny_llama: Checkpoint) -> None:
    for device, kind in (("cpu", CpuRunner), ("echo", EchoRunner)):
        seen: list[float] = []
        config = EngineConfig(model=".", device=device, num_blocks=7, block_size=8)  # type: ignore[arg-type]
        runner, model = build(config, tiny_llama, lambda what, done, seen=seen: seen.append(done))
        assert isinstance(runner, kind)
        assert (runner.num_blocks, runner.block_size, runner.vocab_size) == (7, 8, 160)
        assert model.eos_token_ids == (2,)
        assert seen[-1] == 1.0


def test_the_pool_takes_the_memory_that_the_settings_give_it(tiny_llama: Checkpoint) -> None:
    config = EngineConfig(model=".", kv_cache_memory_bytes=1 << 20)
    runner, model = build(config, tiny_llama, lambda what, done: None)
    assert runner.num_blocks == (1 << 20) // model.kv_layout(config.dtype).block_bytes(
        config.block_size
    )


def test_a_pool_beyond_all_memory_is_refused(tiny_llama: Checkpoint) -> None:
    config = EngineConfig(model=".", num_blocks=1 << 50)
    with pytest.raises(ConfigError, match="out of memory for"):
        build(config, tiny_llama, lambda what, done: None)


def test_a_context_beyond_the_models_is_refused_before_loading(tiny_llama: Checkpoint) -> None:
    config = EngineConfig(model=".", max_model_len=1000)
    with pytest.raises(ConfigError, match="allowed: up to 256"):
        build(config, tiny_llama, lambda what, done: pytest.fail("it loaded"))


def test_the_context_may_be_used_to_its_last_token(tiny_llama: Checkpoint) -> None:
    runner = tiny.make_runner(tiny_llama, max_model_len=24)
    prompt = [i % 160 for i in range(24)]
    assert len(text(runner, prompt, 1)) == 1


def test_bfloat16_answers_too(tiny_llama: Checkpoint) -> None:
    runner = tiny.make_runner(tiny_llama, dtype="bfloat16")
    sequences = [
        tiny.make_sequence(PROMPT, [0, 1, 2, 3]),
        tiny.make_sequence(PROMPT * 3, list(range(10, 18)), SamplingParams(seed=3), seed=3),
    ]
    texts = tiny.generate(runner, sequences, 6)
    assert [len(ids) for ids in texts] == [6, 6]
    assert texts[0] == text(runner, num_tokens=6)


# ---------------------------------------------------------------- echo


@pytest.fixture(scope="module")
def echo(tiny_llama: Checkpoint) -> Runner:
    return tiny.make_runner(tiny_llama, device="echo")


def test_echo_answers_the_prompt_and_then_ends(echo: Runner) -> None:
    ends = {"eos_token_ids": frozenset({2, 50})}
    assert text(echo, [7, 8, 9], 5, ends) == [7, 8, 9, 2, 2]
    assert text(echo, [7, 8, 9], 7) == [7, 8, 9, 7, 8, 9, 7]
    assert text(echo, [7, 8, 9], 5, ends, ignore_eos=True) == [7, 8, 9, 7, 8]
    assert text(echo, [7, 8, 9], 6, ends, min_tokens=5) == [7, 8, 9, 7, 8, 2]


def test_echo_speaks_only_when_a_chunk_reaches_the_end(echo: Runner) -> None:
    sequence = tiny.make_sequence([7, 8, 9], [0])
    assert tiny.run(echo, [tiny.chunk(sequence, 0, 2)]).token_ids == [[]]
    output = tiny.run(echo, [tiny.chunk(sequence, 2, 1)])
    assert (output.token_ids, output.logprobs) == ([[7]], [[0.0]])


def test_echo_never_loads_torch(tiny_llama: Checkpoint) -> None:
    code = (
        "import sys; from pathlib import Path; from inflight.checkpoint.locate import Checkpoint;"
        "from inflight.config import EngineConfig;"
        "from inflight.execution.factory import build, resolve_device;"
        f"c = Checkpoint(Path({str(tiny_llama.path)!r}), 'huggingface');"
        "build(EngineConfig(model='.', device='echo'), c, lambda what, done: None);"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_first_tokens_over_seeds_follow_the_models_distribution(runner: Runner) -> None:
    """300 sequences of one prompt, one batch: frequencies match the model's distribution."""
    sequences = [
        tiny.make_sequence([5], [0], SamplingParams(temperature=1.0), seed=seed)
        for seed in range(300)
    ]
    output = tiny.run(runner, [tiny.chunk(sequence, 0, 1) for sequence in sequences])
    tokens = np.array([ids[0] for ids in output.token_ids])
    logprobs = {t: p[0] for t, p in zip(tokens.tolist(), output.logprobs, strict=True)}
    for token, logprob in logprobs.items():
        expected = 300 * np.exp(logprob)
        if expected > 8:
            assert abs((tokens == token).sum() - expected) < 4.5 * np.sqrt(expected)


def test_auto_is_the_cpu_without_a_gpu(
    tiny_llama: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    placed, where = resolve_device(
        EngineConfig(model=".", device="auto", max_num_seqs=3), tiny_llama
    )
    assert (placed.device, placed.dtype, placed.max_num_seqs) == ("cpu", "float32", 3)
    assert placed.max_num_batched_tokens == EngineConfig(model=".").max_num_batched_tokens
    assert where == "CPU: torch finds no GPU"


@pytest.mark.parametrize(("device", "where"), [("cpu", "CPU"), ("cuda", "GPU"), ("echo", "echo")])
def test_a_device_that_is_named_is_taken(tiny_llama: Checkpoint, device: Any, where: str) -> None:
    config = EngineConfig(model=".", device=device)
    assert resolve_device(config, tiny_llama) == (config, where)


@pytest.mark.parametrize(
    ("capability", "head_dim", "settings", "obstacle"),
    [
        ((9, 0), 64, {}, None),
        ((8, 0), 128, {"dtype": "bfloat16", "block_size": 64}, None),
        ((12, 0), 128, {}, None),
        ((7, 5), 64, {}, "the GPU has compute capability 7.5; the kernels support 8.x to 12.x"),
        ((13, 0), 64, {}, "the GPU has compute capability 13.0; the kernels support 8.x to 12.x"),
        ((9, 0), 16, {}, r"head_dim 16 (allowed: 64, 96, 128, 256) is not supported on GPUs"),
        ((9, 0), 64, {"dtype": "float32"}, "dtype is float32, and GPUs support bfloat16 only"),
        ((9, 0), 64, {"block_size": 8}, "block_size is 8, and GPUs support (16, 32, 64)"),
    ],
)
def test_auto_is_the_gpu_unless_something_is_in_its_way(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    head_dim: int,
    settings: dict[str, Any],
    obstacle: str | None,
) -> None:
    checkpoint = tiny.write_llama(tmp_path, head_dim=head_dim)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    placed, where = resolve_device(EngineConfig(model=".", device="auto", **settings), checkpoint)
    assert placed.device == ("cpu" if obstacle else "cuda")
    assert where == (f"CPU: {obstacle}" if obstacle else "GPU")


@pytest.mark.parametrize("capability", [(7, 5), (13, 0)])
def test_a_gpu_that_the_kernels_do_not_support_is_refused(
    tiny_llama: Checkpoint, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    config = EngineConfig(model=str(tiny_llama.path), device="cuda")
    version = ".".join(map(str, capability))
    with pytest.raises(
        ConfigError, match=rf"device: .* {version}; .* 8\.x to 12\.x; set it to cpu"
    ):
        build(config, tiny_llama, lambda what, fraction: None)


def test_a_gpu_without_the_kernels_compiler_says_what_to_install(
    tiny_llama: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inflight.execution.factory._has_compiler", lambda: False)
    config = EngineConfig(model=str(tiny_llama.path), device="cuda")
    with pytest.raises(ConfigError, match=r"device: the kernel compiler is missing; run"):
        build(config, tiny_llama, lambda what, fraction: None)
