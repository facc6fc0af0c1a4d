"""Drafting does not change outputs; and an oracle drafter's drafts are all accepted, whatever the
engine's state."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import tiny
from eagle3_reference import Head
from inflight.checkpoint.locate import Checkpoint
from inflight.config import EngineConfig, SpeculativeConfig
from inflight.core.batch import Chunk
from inflight.core.request import Request
from inflight.engine.engine import Engine, generate
from inflight.execution import factory as runners
from inflight.sampling.params import SamplingParams
from thinned import thinned

SHAPE = {"num_hidden_layers": 5}
SETTINGS = tiny.SETTINGS | SHAPE
DRAFT_VOCAB_SIZE = 60
NUM_DRAFTS = 4
DRAFTERS = ("ngram", "suffix", "self", "draft_model", "eagle3")
ALONE = pytest.param({"max_num_seqs": 1}, id="alone")
TOGETHER = pytest.param({}, id="together")
CHUNKS = pytest.param({"max_prefill_chunk": 5, "max_num_batched_tokens": 24}, id="chunks")
PREEMPTION = pytest.param({"num_blocks": 40}, id="preemption")
PREFIXES = pytest.param({"enable_prefix_caching": True}, id="prefixes")
WAYS = [PREEMPTION, PREFIXES, TOGETHER, CHUNKS, ALONE]
# Where a drafter's own state may be lost or found.
OWN_STATE_WAYS = [
    PREEMPTION,
    PREFIXES,
    CHUNKS,
    *(pytest.param(*way.values, id=way.id, marks=pytest.mark.long) for way in (TOGETHER, ALONE)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, one that is nearly the same, and a head."""
    folder = tmp_path_factory.mktemp("models")
    weights = tiny.random_weights(SETTINGS)
    for name in weights:
        if "layers" in name and "norm" not in name:
            weights[name] *= 0.5  # so that the first layers say what the last ones do, mostly
    tiny.write_llama(folder / "target", weights, **SHAPE)
    noise = torch.Generator().manual_seed(1)
    nearly = {
        name: value + 0.02 * torch.randn(value.shape, generator=noise)
        for name, value in weights.items()
    }
    tiny.write_llama(folder / "smaller", nearly, **SHAPE)
    tiny.write_eagle3(folder / "head", tiny.random_head(SETTINGS, DRAFT_VOCAB_SIZE))
    return folder


def drafting(folder: Path, drafter: str, **changes: Any) -> SpeculativeConfig:
    settings: dict[str, Any] = {"method": drafter, "default": NUM_DRAFTS, "prompt_lookup_min": 1}
    if drafter == "self":
        settings["num_layers"] = 3
    elif drafter in ("draft_model", "eagle3"):
        settings["model"] = str(folder / {"draft_model": "smaller", "eagle3": "head"}[drafter])
    return SpeculativeConfig(**(settings | changes))


def make_engine(
    folder: Path, speculation: SpeculativeConfig | None = None, **settings: Any
) -> Engine:
    defaults: dict[str, Any] = {
        "num_threads": 1,
        "block_size": 4,
        "num_blocks": 400,
        "max_num_seqs": 16,
        "enable_prefix_caching": False,
    }
    config = EngineConfig(
        model=str(folder / "target"), speculative_config=speculation, **(defaults | settings)
    )
    checkpoint = Checkpoint(folder / "target", "huggingface")
    runner, model = runners.build(config, checkpoint, lambda what, fraction: None)
    return Engine(config, runner, model.max_model_len(config), model.eos_token_ids)


def requests(max_tokens: int = 16, **params: Any) -> list[Request]:
    """24 prompts, of which some begin alike; every other one is drawn."""
    generator = random.Random(3)
    common = [generator.randrange(3, 160) for _ in range(16)]
    found = []
    for i in range(24):
        prompt = [generator.randrange(3, 160) for _ in range(generator.randint(1, 30))]
        if i % 3 == 0:
            prompt = common + prompt[: i // 3]
        options = {"temperature": 0.0}
        if i % 2:
            options = {"temperature": 0.9, "top_p": 0.95, "seed": i}
        given = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **(options | params))
        found.append(Request(i, prompt, given))
    return found


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[int, list[int]]:
    """What is said without drafts."""
    return generate(make_engine(folder), requests())


@pytest.mark.parametrize(("drafter", "way"), thinned(DRAFTERS, WAYS, one_in=3))
def test_drafts_leave_no_trace(
    folder: Path, expected: dict[int, list[int]], drafter: str, way: dict[str, Any]
) -> None:
    # One after another they share no step: a third of them shows as much.
    given = requests()[:8] if way.get("max_num_seqs") == 1 else requests()
    engine = make_engine(folder, drafting(folder, drafter), **way)
    if drafter == "eagle3":  # a head with random weights is never right by itself
        Spoiled(engine, expected)
    assert generate(engine, given) == {one.request_id: expected[one.request_id] for one in given}
    stats = engine.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_drafted_tokens
    if "num_blocks" in way:
        assert stats.num_preemptions > 0
    if way.get("enable_prefix_caching"):
        assert stats.num_cached_tokens > 0


@pytest.mark.parametrize("way", OWN_STATE_WAYS)
def test_drafts_from_earlier_outputs_leave_no_trace(
    folder: Path, expected: dict[int, list[int]], way: dict[str, Any]
) -> None:
    given = requests()[:8] if way.get("max_num_seqs") == 1 else requests()
    engine = make_engine(
        folder, drafting(folder, "suffix", suffix_decoding_max_cached_tokens=2000), **way
    )
    for first_id in (0, 100, 200):
        again = [Request(first_id + one.request_id, one.prompt_ids, one.params) for one in given]
        outputs = generate(engine, again)
        assert outputs == {first_id + one.request_id: expected[one.request_id] for one in given}
    accepted = engine.metrics().value("spec_decode_num_accepted_tokens_from_outputs")
    assert accepted > len(given) * 16  # of 32 tokens in the last two rounds
    assert accepted < engine.stats().num_accepted_tokens
    if "num_blocks" in way:
        assert engine.stats().num_preemptions > 0


def penalised_requests() -> list[Request]:
    return requests(repetition_penalty=1.3, presence_penalty=0.4, logit_bias=((7, 2.0),))


@pytest.fixture(scope="module")
def expected_penalised(folder: Path) -> dict[int, list[int]]:
    """The same of penalised requests."""
    return generate(make_engine(folder), penalised_requests())


@pytest.mark.parametrize(
    "drafter",
    [
        *("ngram", "self", "eagle3"),
        *(pytest.param(one, marks=pytest.mark.long) for one in ("suffix", "draft_model")),
    ],
)
def test_drafts_leave_no_trace_in_penalised_output(
    folder: Path, expected_penalised: dict[int, list[int]], drafter: str
) -> None:
    engine = make_engine(folder, drafting(folder, drafter))
    assert generate(engine, penalised_requests()) == expected_penalised


class Spoiled:
    """A drafter of whose guesses some are replaced by wrong ones.

    Args:
        engine: whose drafter it takes the place of.
        expected: what will be said; where it is known, some guesses are replaced by right ones.

    Attributes:
        num_right: guesses before the first that was replaced.
        num_spoiled: times that one was.
        proposed: of greedy sequences, the request, what stood there and what was guessed.
    """

    def __init__(self, engine: Engine, expected: dict[int, list[int]] | None = None) -> None:
        self._expected = expected
        drafter = engine.runner.drafter  # type: ignore[attr-defined]
        self._propose: Callable[[list[Chunk]], list[list[int]]] = drafter.propose
        drafter.propose = self.propose
        self.num_right = 0
        self.num_spoiled = 0
        self.proposed: list[tuple[int, list[int], list[int]]] = []

    def propose(self, chunks: list[Chunk]) -> list[list[int]]:
        proposed = self._propose(chunks)
        for chunk, drafts in zip(chunks, proposed, strict=True):
            assert len(drafts) == chunk.num_drafts
            if drafts and chunk.sequence.request.params.temperature == 0.0:
                sequence = chunk.sequence
                self.proposed.append((sequence.request_id, list(sequence.token_ids), list(drafts)))
            if self._expected is not None and chunk.start % 2:
                sequence = chunk.sequence
                rest = self._expected[sequence.request_id][sequence.num_output_tokens :]
                drafts[:] = rest[: len(drafts)]
            right = len(drafts)
            if drafts and (chunk.start + chunk.sequence.request_id) % 3 == 0:
                right = (chunk.start // 2) % len(drafts)
                drafts[right] = (drafts[right] + 1) % 160
                self.num_spoiled += 1
            self.num_right += right
        return proposed


def generate_twice(engine: Engine, expected: dict[int, list[int]]) -> None:
    """The second time all of a prompt is in the cache, and its last block may be copied."""
    assert generate(engine, requests()) == expected
    if engine.config.enable_prefix_caching:
        again = [Request(100 + one.request_id, one.prompt_ids, one.params) for one in requests()]
        outputs = generate(engine, again)
        assert outputs == {100 + request_id: ids for request_id, ids in expected.items()}


@pytest.mark.parametrize(("drafter", "way"), thinned(["self", "draft_model"], WAYS, one_in=2))
def test_a_drafter_that_is_the_model_is_right_each_time(
    folder: Path, expected: dict[int, list[int]], drafter: str, way: dict[str, Any]
) -> None:
    """Its keys and values are those of the very tokens: after prompts in parts, lost blocks, found
    prefixes, and drafts that were not taken."""
    itself = {"self": {"num_layers": 5}, "draft_model": {"model": str(folder / "target")}}
    engine = make_engine(folder, drafting(folder, drafter, **itself[drafter]), **way)
    spoiled = Spoiled(engine)
    generate_twice(engine, expected)
    assert spoiled.num_spoiled > 20
    assert engine.stats().num_accepted_tokens == spoiled.num_right > 100


@pytest.fixture(scope="module")
def features(folder: Path, expected: dict[int, list[int]]) -> dict[int, Tensor]:
    """What a head reads of each token, by request: [T, 3 * hidden] from `transformers`."""
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()
    aux_layers = (2, SETTINGS["num_hidden_layers"] // 2, SETTINGS["num_hidden_layers"] - 3)
    found = {}
    for one in requests():
        whole = torch.tensor([one.prompt_ids + expected[one.request_id]])
        with torch.inference_mode():
            states = target(whole, output_hidden_states=True).hidden_states
        found[one.request_id] = torch.cat([states[tap][0] for tap in aux_layers], -1)
    return found


@pytest.mark.parametrize("way", OWN_STATE_WAYS)
def test_an_eagle3_head_matches_the_reference(
    folder: Path,
    expected: dict[int, list[int]],
    features: dict[int, Tensor],
    way: dict[str, Any],
) -> None:
    """As `transformers` and plain torch do, that see whole texts and keep nothing."""
    engine = make_engine(folder, drafting(folder, "eagle3"), **way)
    spoiled = Spoiled(engine, expected)
    assert generate(engine, requests()) == expected
    assert engine.stats().num_accepted_tokens > 100
    assert len(spoiled.proposed) > 60

    embedding = load_file(folder / "target" / "model.safetensors")["model.embed_tokens.weight"]
    head = Head(tiny.random_head(SETTINGS, DRAFT_VOCAB_SIZE), SETTINGS, embedding)
    right = 0
    sample = random.Random(4).sample(spoiled.proposed, 60)
    for request_id, token_ids, drafts in sample:
        known = features[request_id][: len(token_ids) - 1]
        right += head.drafts(known, token_ids, len(drafts)) == drafts
    # Where a prefix was found, the entry of its last position may be of another next token.
    assert right >= len(sample) * (0.8 if way.get("enable_prefix_caching") else 1)
