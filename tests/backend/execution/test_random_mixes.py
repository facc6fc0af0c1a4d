"""Whatever requests come together, however steps are cut, recorded and filled up, and whatever is
drafted: a GPU's runner returns what the CPU's does. Here the kernels are replaced by their
definitions in torch, and what a step has not written is poisoned."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import host_kernels
import long_results
from device_drafting import Rig, small_rig
from inflight.checkpoint.locate import Checkpoint
from inflight.config import EngineConfig
from inflight.core.batch import Batch
from inflight.core.request import Candidate, Request
from inflight.core.step_size import StepSize
from inflight.engine.engine import Engine
from inflight.execution import factory as runners
from inflight.execution.cuda_runner import CudaRunner
from inflight.models.layers import residual
from inflight.sampling.params import SamplingParams
from poisoned_memory import poison_memory, poison_steps

VOCAB_SIZE = 160
NUM_REQUESTS = 14
SOME_MIXES = (1, 3, 5, 7, 8, 10)  # with drafters of all kinds but one, and without
NUM_MIXES = 224
MOST_MIXES = 24  # until steps of all kinds were seen

DRAFTERS: tuple[dict[str, Any] | None, ...] = (
    None,
    {"method": "ngram", "prompt_lookup_min": 1},
    {"method": "suffix", "prompt_lookup_min": 1},
    {"method": "self", "num_layers": 3},
    {"method": "draft_model"},
    {"method": "eagle3"},
)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return small_rig(tmp_path_factory.mktemp("models"), max_len=128)


@dataclass
class Outcome:
    """What was said of one request."""

    token_ids: list[int] = field(default_factory=list)
    candidates: list[list[Candidate]] = field(default_factory=list)
    prompt_candidates: list[list[Candidate]] = field(default_factory=list)
    logprob: float = 0.0
    error: str | None = None

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Outcome)
            and self.token_ids == other.token_ids
            and self.error == other.error
            and other.logprob == pytest.approx(self.logprob, abs=1e-3)
            and _agree(self.candidates, other.candidates)
            and _agree(self.prompt_candidates, other.prompt_candidates)
        )


def _agree(some: list[list[Candidate]], others: list[list[Candidate]]) -> bool:
    def ids(candidates: list[list[Candidate]]) -> list[list[int]]:
        return [[one.token_id for one in each] for each in candidates]

    def logprobs(candidates: list[list[Candidate]]) -> list[float]:
        return [one.logprob for each in candidates for one in each]

    return ids(some) == ids(others) and logprobs(some) == pytest.approx(logprobs(others), abs=1e-3)


def settings_of(generator: random.Random) -> dict[str, Any]:
    """Of an engine: often with a small pool, so that sequences lose their blocks."""
    found = {
        "max_num_seqs": generator.choice([1, 2, 4, 6, 9]),
        "max_num_batched_tokens": generator.choice([40, 64, 100, 200]),
        "num_blocks": generator.choice([9, 10, 12, 14, 24, 60]),
        "enable_prefix_caching": generator.random() < 0.6,
    }
    if generator.random() < 0.4:
        found["max_prefill_chunk"] = generator.choice([7, 16, 30])
    if generator.random() < 0.3:
        found["max_draft_tokens"] = generator.choice([1, 4, 9])
    return found


def requests_of(generator: random.Random, most_beams: int) -> list[Request]:
    common = generator.choices(range(3, VOCAB_SIZE), k=48)
    return [
        Request(1 + i, _prompt(generator, common), _params(generator, i, most_beams))
        for i in range(NUM_REQUESTS)
    ]


def _prompt(generator: random.Random, common: list[int]) -> list[int]:
    """Of any length around whole blocks of 16; some begin alike, some are the same."""
    length = generator.choice([1, 2, 3, 5, 9, 15, 16, 17, 20, 31, 33, 40, 60])
    own = generator.choices(range(3, VOCAB_SIZE), k=length)
    shared = common[: generator.choice([16, 32, 33, 48])]
    return generator.choice([own, own, (shared + own)[:80], shared])


def _params(generator: random.Random, number: int, most_beams: int) -> SamplingParams:
    def now_and_then() -> bool:
        return generator.random() < 0.2

    options: dict[str, Any] = {"temperature": 0.0}
    if generator.random() < 0.5:
        options = {"temperature": 0.8, "seed": number}
        if now_and_then():
            options["top_k"] = 20
    if now_and_then():
        options["num_prompt_logprobs"] = generator.choice([0, 2])
    if now_and_then():
        options["num_logprobs"] = generator.choice([0, 3])
    if now_and_then():
        biased = sorted(generator.sample(range(3, VOCAB_SIZE), 5))
        options["logit_bias"] = tuple((one, generator.uniform(-3, 3)) for one in biased)
    if now_and_then():
        options["allowed_token_ids"] = tuple(sorted(generator.sample(range(3, VOCAB_SIZE), 30)))
    if now_and_then():
        options |= {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3}
    if now_and_then():
        options["no_repeat_ngram_size"] = 2
    if most_beams > 1 and now_and_then():
        options = {"temperature": 0.0, "beam_width": generator.choice([2, min(3, most_beams)])}
    max_tokens = generator.choice([1, 3, 8, 20])
    if "beam_width" in options:  # all beams fit into the smallest pool
        max_tokens = min(max_tokens, 8)
    return SamplingParams(max_tokens=max_tokens, ignore_eos=generator.random() < 0.7, **options)


def run(engine: Engine, requests: list[Request], generator: random.Random) -> dict[int, Outcome]:
    """Requests that come while others run."""
    events_by_id = {request.request_id: Outcome() for request in requests}
    waiting = requests[::-1]
    while waiting or engine.has_work:
        while waiting and (not engine.has_work or generator.random() < 0.35):
            engine.submit(waiting.pop())
        for event in engine.step():
            one = events_by_id[event.request_id]
            one.error = event.error
            one.token_ids += event.token_ids
            one.candidates += event.candidates
            one.prompt_candidates += event.prompt_candidates
            one.logprob = event.cumulative_logprob
    return events_by_id


def on_cpu(folder: Path, settings: dict[str, Any]) -> Engine:
    checkpoint = Checkpoint(folder, "huggingface")
    config = EngineConfig(model=str(folder), num_threads=1, **settings)
    runner, model = runners.build(config, checkpoint, lambda what, fraction: None)
    return Engine(config, runner, model.max_model_len(config), model.eos_token_ids)


@pytest.fixture(scope="module")
def results() -> Iterator[list[dict[str, Any]]]:
    """The mixes of the full count."""
    yield from long_results.collected("random-mixes", "random mixes, GPU runner and CPU runner")


@pytest.mark.parametrize(
    "seed",
    [
        seed if seed in SOME_MIXES else pytest.param(seed, marks=pytest.mark.long)
        for seed in range(NUM_MIXES)
    ],
)
def test_the_gpu_runner_matches_the_cpu_runner(
    request: pytest.FixtureRequest,
    rig: Rig,
    seed: int,
    results: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = time.monotonic()
    generator = random.Random(seed)
    settings, drafter = settings_of(generator), generator.choice(DRAFTERS)
    requests = requests_of(generator, settings["max_num_seqs"])
    expected = run(on_cpu(rig.folder / "target", settings), requests, random.Random(seed))
    assert all(one.error is None for one in expected.values())
    host_kernels.install(monkeypatch)
    poison_steps(monkeypatch, generator)
    if seed % 2:  # the residual stream is as narrow as a large model's
        monkeypatch.setattr(residual, "_MAX_WIDE_HIDDEN_SIZE", 0)
    for cuda_graphs in (True, False):
        engine = rig.make_engine(drafter, cuda_graphs=cuda_graphs, **settings)
        assert isinstance(engine.runner, CudaRunner)
        poison_memory(engine.runner)
        assert run(engine, requests, random.Random(seed)) == expected
        assert engine.scheduler.num_free_blocks == engine.runner.num_blocks
    if request.node.get_closest_marker("long"):
        results.append(
            {
                "seed": seed,
                "method": None if drafter is None else drafter["method"],
                "settings": settings,
                "requests": len(requests),
                "tokens": sum(len(one.token_ids) for one in expected.values()),
                "seconds": round(time.monotonic() - started, 1),
            }
        )


def test_the_mixes_go_through_steps_of_all_kinds(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded ones of decode, of drafts, of a prompt alone and of some together, filled up and
    full; and steps that are launched."""
    host_kernels.install(monkeypatch)
    kinds = {(kind, full) for kind in ("decode", "drafts", "prompt") for full in (True, False)}
    wanted = kinds | {("prompts", False), ("launched", True)}
    seen: set[tuple[str, bool]] = set()
    launch = CudaRunner.launch

    def kind_of(size: StepSize) -> str:
        if size.num_rows == size.num_tokens:
            return "decode" if size.max_q_len == 1 else "drafts"
        return "prompt" if size.num_chunks == 1 else "prompts"

    def noted(runner: CudaRunner, batch: Batch) -> Any:
        size = StepSize.of(batch)
        bucket = next((bucket for bucket in runner._graphs if bucket.fits(size)), None)
        if bucket is None:
            seen.add(("launched", True))
        else:
            seen.add((kind_of(bucket), bucket.num_tokens == size.num_tokens))
        return launch(runner, batch)

    monkeypatch.setattr(CudaRunner, "launch", noted)
    for seed in range(MOST_MIXES):
        generator = random.Random(seed)
        settings, drafter = settings_of(generator), generator.choice(DRAFTERS)
        requests = requests_of(generator, settings["max_num_seqs"])
        run(rig.make_engine(drafter, **settings), requests, random.Random(seed))
        if seen >= wanted:
            return
    assert seen >= wanted
