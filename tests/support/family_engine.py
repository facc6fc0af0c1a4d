"""Engines of a family: what they generate is what transformers computes for the same text."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
import vocabularies
from inflight.checkpoint.locate import Checkpoint
from inflight.config import EngineConfig, SpeculativeConfig
from inflight.core.output_constraint import parse
from inflight.core.request import FinishReason, Request, TokenEvent
from inflight.engine.engine import Engine
from inflight.execution import cpu_runner, factory
from inflight.sampling.params import SamplingParams
from inflight.text.detokenize import Detokenizer
from inflight.text.tokenizer import Tokenizer

PATTERN = r"[a-c]{3,6}(, [0-9]{2}){2}"
NUM_OUTPUT = 12
TOLERANCE = 1e-3
VOCAB_SIZE = 640


def make_engine(
    checkpoint: Checkpoint,
    speculation: SpeculativeConfig | None,
    tokenizer: Tokenizer | None = None,
    **settings: Any,
) -> Engine:
    """With small blocks, prompts in chunks and a prefix cache."""
    config = EngineConfig(
        model=str(checkpoint.path),
        num_threads=1,
        block_size=4,
        num_blocks=64,
        max_num_seqs=4,
        max_prefill_chunk=7,
        max_model_len=64,
        enable_prefix_caching=True,
        speculative_config=speculation,
        **settings,
    )
    with pytest.MonkeyPatch.context() as patched:
        # Requests have a fixed number of drafts, so that nothing depends on what steps cost.
        patched.setattr(cpu_runner, "_TIMINGS", 1)
        runner, spec = factory.build(config, checkpoint, lambda what, fraction: None)
    eos_token_ids = tokenizer.eos_ids if tokenizer else ()
    return Engine(config, runner, spec.max_model_len(config), eos_token_ids, tokenizer)


def self_drafting(num_layers: int) -> SpeculativeConfig:
    """Drafts by the model itself, all of which are right."""
    return SpeculativeConfig(method="self", default=3, num_layers=num_layers)


def eagle3(folder: Path, settings: dict[str, Any]) -> SpeculativeConfig:
    """Drafts by a head with random weights, few of which are right."""
    shape = {key: settings[key] for key in ("vocab_size", "hidden_size")}
    head = tiny.random_head(tiny.SETTINGS | shape, draft_vocab_size=60)
    aux = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    tiny.write_eagle3(folder, head, **shape, **aux)
    return SpeculativeConfig(method="eagle3", default=3, model=str(folder))


def run(engine: Engine, requests: list[Request]) -> dict[int, list[TokenEvent]]:
    events: dict[int, list[TokenEvent]] = {one.request_id: [] for one in requests}
    for one in requests:
        engine.submit(one)
    while engine.has_work or engine.is_compiling:
        for event in engine.sweep() + engine.step():
            assert event.error is None
            events[event.request_id].append(event)
    return events


def _prompts(vocab_size: int) -> list[list[int]]:
    """Every other one begins as another one does."""
    generator = random.Random(1)
    common = [generator.randrange(3, vocab_size) for _ in range(12)]
    return [
        common[: 12 * (index % 2)] + [generator.randrange(3, vocab_size) for _ in range(length)]
        for index, length in enumerate((1, 5, 20, 9))
    ]


def greedy_texts(engine: Engine, vocab_size: int) -> list[list[int]]:
    """Of these prompts, at the same time."""
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=NUM_OUTPUT)
    requests = [Request(i, prompt, params) for i, prompt in enumerate(_prompts(vocab_size))]
    return [
        [token_id for event in events for token_id in event.token_ids]
        for events in run(engine, requests).values()
    ]


def check_greedy(engine: Engine, vocab_size: int, texts: list[list[int]], tolerance: float) -> None:
    """Each token of texts after these prompts is the most probable one, up to a difference of
    logprobs."""
    params = SamplingParams(temperature=0.0, max_tokens=1, num_prompt_logprobs=1)
    prompts = _prompts(vocab_size)
    requests = [
        Request(1000 + i, prompt + text, params)
        for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
    ]
    for events, prompt, text in zip(run(engine, requests).values(), prompts, texts, strict=True):
        assert len(text) == NUM_OUTPUT
        scored = [one for event in events for one in event.prompt_candidates]
        assert len(scored) == len(prompt) + NUM_OUTPUT
        for candidates in scored[len(prompt) :]:
            best = max(one.logprob for one in candidates)
            assert candidates[0].logprob >= best - tolerance


def check_texts(engine: Engine, model: Any, vocab_size: int) -> None:
    """Greedy texts and logprobs of prompts are those of transformers, also of prompts in the prefix
    cache."""
    prompts = _prompts(vocab_size)
    # The first time the prompts are scored, the second time they are in the cache.
    for first_id, number in ((0, 1), (100, None)):
        params = SamplingParams(
            temperature=0.0, ignore_eos=True, max_tokens=NUM_OUTPUT, num_prompt_logprobs=number
        )
        requests = [Request(first_id + i, prompt, params) for i, prompt in enumerate(prompts)]
        for events, prompt in zip(run(engine, requests).values(), prompts, strict=True):
            _check_text(model, prompt, events, is_scored=number is not None)
    assert engine.stats().num_cached_tokens > 0


@torch.inference_mode()
def _check_text(model: Any, prompt: list[int], events: list[TokenEvent], is_scored: bool) -> None:
    output = [token_id for event in events for token_id in event.token_ids]
    assert len(output) == NUM_OUTPUT
    # Further tokens, which no earlier one sees, make it longer than a tiny model's trained context:
    # transformers changes LongRoPE's factors there, an engine with a long context does not.
    longer = torch.tensor([prompt + output + [0] * 16])
    logprobs = model(longer).logits[0, : len(prompt) + NUM_OUTPUT].log_softmax(-1)
    # A tie may be broken either way.
    rows = logprobs[len(prompt) - 1 : -1]
    assert (rows[torch.arange(NUM_OUTPUT), output] >= rows.max(-1).values - TOLERANCE).all()
    scored = [one for event in events for one in event.prompt_candidates]
    assert len(scored) == (len(prompt) if is_scored else 0)
    for position, candidates in enumerate(scored[1:], start=1):
        expected = float(logprobs[position - 1, prompt[position]])
        assert abs(candidates[0].logprob - expected) < TOLERANCE


def tokenizer(folder: Path) -> Tokenizer:
    """Of VOCAB_SIZE tokens at most."""
    found = Tokenizer.load(Checkpoint(vocabularies.byte_level_folder(folder), "huggingface"))
    assert found.vocab_size <= VOCAB_SIZE
    return found


def check_constrained_text(engine: Engine, found: Tokenizer) -> None:
    """A text with a constraint matches it, beside one without."""
    constrained = parse("regex", PATTERN)
    prompt = found.encode("Letters and numbers: ")
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=40)
    events = run(
        engine,
        [Request(1, prompt, params, structured=constrained), Request(2, prompt, params)],
    )
    assert events[1][-1].finish_reason == FinishReason.STOP
    ids = [token_id for event in events[1] for token_id in event.token_ids]
    text = Detokenizer(found).join([id_ for id_ in ids if id_ not in engine.eos_token_ids])
    assert re.fullmatch(PATTERN, text.decode())
