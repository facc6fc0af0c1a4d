"""Beam search: outputs are those of Transformers, whatever else runs and whoever yields."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

import host_kernels
import tiny
from inflight.checkpoint import Checkpoint
from inflight.config import EngineConfig
from inflight.cuda_runner import CudaRunner
from inflight.engine import Engine
from inflight.model.config import read_config
from inflight.request import FinishReason, Request, TokenEvent
from inflight.runner import build
from inflight.sampling import SamplingParams

VOCAB_SIZE = 40
ENDS = (2, 7, 11)
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "eos_token_id": list(ENDS),
}
DEVICES = ["cpu", "cuda"]

# Each has a prompt of its own.
SEARCHES: list[dict[str, Any]] = [
    {"beam_width": 2, "n": 1, "max_tokens": 12},
    {"beam_width": 2, "n": 2, "max_tokens": 1},
    {"beam_width": 3, "n": 3, "max_tokens": 20, "length_penalty": 0.0},
    {"beam_width": 4, "n": 2, "max_tokens": 30, "length_penalty": 2.0},
    {"beam_width": 4, "n": 4, "max_tokens": 30, "length_penalty": -1.0},
    {"beam_width": 4, "n": 4, "max_tokens": 24, "early_stopping": True},
    {"beam_width": 6, "n": 5, "max_tokens": 16, "early_stopping": True, "length_penalty": 0.7},
    {"beam_width": 5, "n": 5, "max_tokens": 20, "min_tokens": 9},
    {"beam_width": 3, "n": 3, "max_tokens": 25, "no_repeat_ngram_size": 2, "min_tokens": 20},
    {"beam_width": 8, "n": 8, "max_tokens": 18},
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    weights = tiny.random_weights(tiny.SETTINGS | SHAPE)
    for name in weights:
        if "lm_head" in name:  # so that many tokens are nearly as likely as the likeliest
            weights[name] *= 0.6
    folder = tmp_path_factory.mktemp("model")
    return tiny.write_llama(folder, weights, **SHAPE)


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoint) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.float32).eval()


def prompt(index: int) -> list[int]:
    """Of different lengths; every third one begins like the others of these."""
    generator = random.Random(index)
    own = [generator.randrange(12, VOCAB_SIZE) for _ in range(1 + 5 * index % 23)]
    common = [random.Random(99).randrange(12, VOCAB_SIZE) for _ in range(18)]
    return common + own if index % 3 == 0 else own


def expected(model: Any, index: int) -> list[tuple[list[int], float]]:
    """What Transformers finds: ids and log-probability of each output, the best one first."""
    wish = SEARCHES[index]
    ids = torch.tensor([prompt(index)])
    config = GenerationConfig(
        do_sample=False,
        num_beams=wish["beam_width"],
        num_return_sequences=wish["n"],
        max_new_tokens=wish["max_tokens"],
        min_new_tokens=wish.get("min_tokens"),
        no_repeat_ngram_size=wish.get("no_repeat_ngram_size", 0),
        length_penalty=wish.get("length_penalty", 1.0),
        early_stopping=wish.get("early_stopping", False),
        eos_token_id=list(ENDS),
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        found = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    outputs = []
    for sequence, score in zip(found.sequences, found.sequences_scores.tolist(), strict=True):
        tokens = sequence[ids.shape[1] :].tolist()
        ends = [place for place, token in enumerate(tokens) if token in ENDS]
        if ends:
            tokens = tokens[: ends[0] + 1]
        outputs.append((tokens, score * len(tokens) ** wish.get("length_penalty", 1.0)))
    return outputs


EXPECTED: dict[int, list[tuple[list[int], float]]] = {}


@pytest.fixture
def right(model: Any) -> list[list[tuple[list[int], float]]]:
    for index in range(len(SEARCHES)):
        if index not in EXPECTED:
            EXPECTED[index] = expected(model, index)
    return [EXPECTED[index] for index in range(len(SEARCHES))]


def make_engine(
    checkpoint: Checkpoint, device: str, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> Engine:
    if device == "cuda":
        host_kernels.install(monkeypatch)
    torch.set_num_threads(1)
    defaults: dict[str, Any] = {
        "max_num_seqs": 12,
        "max_batch_tokens": 64,
        "num_blocks": 80,
        "block_size": 16 if device == "cuda" else 4,
        "prefix_cache": False,
    }
    config = EngineConfig(model=str(checkpoint.path), device=device, **(defaults | settings))
    if device == "cuda":
        runner: Any = CudaRunner(config, checkpoint, read_config(checkpoint), lambda *given: None)
    else:
        runner = build(config, checkpoint, lambda *given: None)[0]
    return Engine(config, runner, 256, ENDS)


def search(index: int, first_id: int | None = None, **changes: Any) -> Request:
    wish = SEARCHES[index] | changes
    n = wish.pop("n")
    request_id = 100 * index if first_id is None else first_id
    ids = tuple(range(request_id, request_id + n))
    return Request(request_id, prompt(index), SamplingParams(**wish), output_ids=ids)


def run(engine: Engine) -> dict[int, TokenEvent]:
    """The events of all requests, of which there is one each."""
    events: dict[int, TokenEvent] = {}
    while engine.has_work:
        for event in engine.step():
            assert event.request_id not in events
            assert event.error is None, event.error
            events[event.request_id] = event
    return events


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("index", range(len(SEARCHES)))
def test_outputs_are_those_of_transformers(
    checkpoint: Checkpoint,
    right: list[list[tuple[list[int], float]]],
    device: str,
    index: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(checkpoint, device, monkeypatch)
    engine.submit(search(index))
    events = run(engine)
    found = [events[100 * index + place] for place in range(SEARCHES[index]["n"])]
    assert [event.token_ids for event in found] == [tokens for tokens, _ in right[index]]
    for event, (tokens, logprob) in zip(found, right[index], strict=True):
        assert event.cumulative_logprob == pytest.approx(logprob, abs=1e-3)
        stopped = tokens[-1] in ENDS
        assert event.finish_reason == (FinishReason.STOP if stopped else FinishReason.LENGTH)
        assert event.position == len(tokens)
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
