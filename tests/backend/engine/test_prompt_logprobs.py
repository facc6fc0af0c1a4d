"""Prompt logprobs match those of `transformers` for the whole prompt, however the engine computes
them, and are reported once. On a CPU, and with the GPU runner on the kernels' reference
implementations; tests/backend/gpu/test_cuda_runner.py covers the kernels."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

import host_kernels
import tiny
from inflight.checkpoint.locate import Checkpoint
from inflight.config import EngineConfig, SpeculativeConfig
from inflight.core.batch import Batch
from inflight.core.request import Candidate, FinishReason, Request, TokenEvent
from inflight.engine.engine import Engine, generate
from inflight.errors import RequestError
from inflight.execution.cpu_runner import CpuRunner
from inflight.execution.cuda_runner import CudaRunner
from inflight.execution.runner import PendingStep, Runner
from inflight.models.registry import read_spec
from inflight.sampling.params import SamplingParams
from thinned import thinned

SHAPE = {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 128,
}
MAX_LEN = 128
NUM_TOP_LOGPROBS = 3
TOLERANCE = 1e-3
SMALL = {"max_num_batched_tokens": 40, "num_blocks": 8}
WAYS = [
    pytest.param({"enable_prefix_caching": True, **SMALL}, id="prefixes and preemption"),
    pytest.param({"max_num_seqs": 1}, id="alone"),
    pytest.param(
        {"speculative_config": SpeculativeConfig(default=3, prompt_lookup_min=1)}, id="drafts"
    ),
    pytest.param({}, id="whole"),
    pytest.param({"max_prefill_chunk": 7}, id="chunks"),
    pytest.param(SMALL, id="preemption"),
    pytest.param({"enable_prefix_caching": True}, id="prefixes"),
]
MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder: Path = tmp_path_factory.mktemp("model")
    return tiny.write_llama(folder, **SHAPE)


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoint) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.float32).eval()


DEVICES = ("cuda", "cpu")
each_way = pytest.mark.parametrize(
    ("device", "settings"), thinned(DEVICES, WAYS, one_in=2), indirect=["device"]
)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def make_engine(device: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> MakeEngine:
    torch.set_num_threads(1)
    if device == "cuda":
        host_kernels.install(monkeypatch)

    def make(
        checkpoint: Checkpoint = checkpoint, max_rows: int | None = None, **settings: Any
    ) -> Engine:
        defaults: dict[str, Any] = {
            "num_blocks": 60,
            "max_num_seqs": 6,
            "max_num_batched_tokens": 64,
            "enable_prefix_caching": False,
        }
        config = EngineConfig(model=str(checkpoint.path), device=device, **(defaults | settings))
        shape = read_spec(checkpoint)
        kind = CpuRunner if device == "cpu" else CudaRunner
        runner: Runner = kind(config, checkpoint, shape, lambda what, fraction: None)
        runner.max_rows = min(max_rows or runner.max_rows, runner.max_rows)
        return Engine(config, runner, shape.max_model_len(config), shape.eos_token_ids)

    return make


def requests(first_id: int = 0) -> list[Request]:
    """Prompts of 1 to 90 tokens, some with a common beginning. Half of them are scored; most draw
    their output, with filters."""
    generator = random.Random(1)
    common = [generator.randrange(3, 160) for _ in range(35)]
    found = []
    for i in range(12):
        prompt = [generator.randrange(3, 160) for _ in range([1, 2, 40, 9, 55, 23][i % 6])]
        if i % 4 < 2 and i:
            prompt = common + prompt
        options: dict[str, Any] = {"temperature": 0.0}
        if i % 3:
            options = {"temperature": 0.8, "seed": i, "top_k": 40}
        if i % 2 == 0:
            options["num_prompt_logprobs"] = NUM_TOP_LOGPROBS if i % 8 else 0
        if i % 4 == 0:
            options["num_logprobs"] = 1
        options["max_tokens"] = 45 if i % 2 else 8  # who goes on for long takes others' blocks
        params = SamplingParams(ignore_eos=True, **options)
        found.append(Request(first_id + i, prompt, params))
    return found


def run(
    engine: Engine, wanted: list[Request], between: Callable[[], None] = lambda: None
) -> dict[int, list[TokenEvent]]:
    events: dict[int, list[TokenEvent]] = {one.request_id: [] for one in wanted}
    for one in wanted:
        engine.submit(one)
    while engine.has_work:
        for event in engine.step():
            assert event.error is None
            events[event.request_id].append(event)
        between()
    return events


def prompt_candidates(events: list[TokenEvent]) -> list[list[Candidate]]:
    return [one for event in events for one in event.prompt_candidates]


def check(
    model: Any, token_ids: list[int], found: list[list[Candidate]], number: int, first: int = 1
) -> None:
    """Each token from `first` on: itself, then the most probable others in order."""
    with torch.inference_mode():
        rows = torch.log_softmax(model(torch.tensor([token_ids])).logits[0], -1)[first - 1 :]
    for row, token, candidates in zip(rows, token_ids[first:], found, strict=False):
        most_probable = row.topk(number).indices.tolist()
        assert [one.token_id for one in candidates] == list(dict.fromkeys([token, *most_probable]))
        for one in candidates:
            value = row[one.token_id]
            assert one.logprob == pytest.approx(float(value), abs=TOLERANCE)
            assert one.rank == 1 + int((row > value).sum())
    assert len(found) == len(token_ids) - first


def check_prompt(model: Any, prompt: list[int], found: list[list[Candidate]], number: int) -> None:
    assert found[0] == []
    check(model, prompt, found[1:], number)


@each_way
def test_prompt_logprobs_match_the_model(
    make_engine: MakeEngine, model: Any, settings: dict[str, Any]
) -> None:
    engine = make_engine(**settings)
    for first_id in (0, 100):  # the second time the whole prompt may stand in the prefix cache
        wanted = requests(first_id)
        for one, events in zip(wanted, run(engine, wanted).values(), strict=True):
            params, output = one.params, [id_ for event in events for id_ in event.token_ids]
            if params.num_prompt_logprobs is None:
                assert prompt_candidates(events) == []
            else:
                check_prompt(
                    model, one.prompt_ids, prompt_candidates(events), params.num_prompt_logprobs
                )
            if params.num_logprobs is not None:
                found = [own for event in events for own in event.candidates]
                whole = one.prompt_ids + output
                check(model, whole, found, params.num_logprobs, len(one.prompt_ids))
            first = next(i for i, event in enumerate(events) if event.token_ids)
            assert not any(event.prompt_candidates for event in events[first + 1 :])
    if "num_blocks" in settings:
        assert engine.stats().num_preemptions > 0
    if settings.get("enable_prefix_caching"):
        assert engine.stats().num_cached_tokens > 0
    assert engine.scheduler.num_free_blocks == engine.runner.num_blocks


@pytest.mark.parametrize(
    ("device", "enable_prefix_caching"),
    thinned(
        DEVICES, [pytest.param(True, id="prefixes"), pytest.param(False, id="alone")], one_in=2
    ),
    indirect=["device"],
)
def test_preemption_during_prefill_reports_each_prompt_token_once(
    make_engine: MakeEngine, model: Any, enable_prefix_caching: bool
) -> None:
    """Including those that a step in flight was about to report."""
    engine = make_engine(enable_prefix_caching=enable_prefix_caching, max_prefill_chunk=9)
    generator = random.Random(3)
    interrupted = 0

    def interrupt() -> None:
        nonlocal interrupted
        for sequence in list(engine.scheduler.running):
            inside = 1 < sequence.num_scored < sequence.num_prompt_tokens
            if generator.random() < (0.3 if inside else 0.02):
                interrupted += inside
                engine.scheduler.suspend(sequence)
                engine.scheduler.resume(sequence)

    wanted = requests()
    for one, events in zip(wanted, run(engine, wanted, interrupt).values(), strict=True):
        if one.params.num_prompt_logprobs is not None:
            check_prompt(
                model, one.prompt_ids, prompt_candidates(events), one.params.num_prompt_logprobs
            )
    assert interrupted > 5
    assert engine.scheduler.num_free_blocks == engine.runner.num_blocks


@pytest.fixture(scope="module")
def unscored_outputs() -> dict[str, dict[int, list[int]]]:
    """Outputs without prompt logprobs, by device; computed by the first test that needs them."""
    return {}


@each_way
def test_an_output_is_the_same_whether_its_prompt_was_looked_at(
    make_engine: MakeEngine,
    unscored_outputs: dict[str, dict[int, list[int]]],
    settings: dict[str, Any],
) -> None:
    engine = make_engine(**settings)
    device = engine.config.device
    if device not in unscored_outputs:
        plain = [
            msgspec.structs.replace(
                one, params=msgspec.structs.replace(one.params, num_prompt_logprobs=None)
            )
            for one in requests()
        ]
        unscored_outputs[device] = generate(make_engine(), plain)
    assert generate(engine, requests()) == unscored_outputs[device]


def test_a_prompt_in_the_prefix_cache_is_computed_again_and_shared_later(
    make_engine: MakeEngine, model: Any
) -> None:
    engine = make_engine(enable_prefix_caching=True)
    prompt = list(range(3, 51))
    scored = SamplingParams(max_tokens=1, num_prompt_logprobs=2, temperature=0.0)
    for request_id in range(2):
        events = run(engine, [Request(request_id, prompt, scored)])[request_id]
        check_prompt(model, prompt, prompt_candidates(events), 2)
        assert events[-1].num_cached_tokens == 0
    (last,) = run(engine, [Request(2, prompt, SamplingParams(max_tokens=1))])[2]
    assert last.num_cached_tokens == 47


def test_without_output_a_prompt_of_the_whole_context_is_scored(
    make_engine: MakeEngine, model: Any
) -> None:
    generator = random.Random(2)
    prompt = [generator.randrange(3, 160) for _ in range(MAX_LEN)]
    engine = make_engine()
    params = SamplingParams(max_tokens=0, num_prompt_logprobs=1)
    plain = SamplingParams(max_tokens=0)
    events = run(
        engine,
        [Request(1, prompt, params), Request(2, prompt[:1], params), Request(3, prompt, plain)],
    )
    check_prompt(model, prompt, prompt_candidates(events[1]), 1)
    assert prompt_candidates(events[2]) == [[]]
    assert prompt_candidates(events[3]) == []
    for own in events.values():
        last = own[-1]
        assert [event.token_ids for event in own] == [[]] * len(own)
        assert (last.finish_reason, last.position) == (FinishReason.LENGTH, 0)
        assert last.cumulative_logprob == 0.0
    assert engine.stats().num_output_tokens == 0
    with pytest.raises(RequestError, match=f"allowed: {MAX_LEN}$"):
        engine.submit(Request(4, [5, *prompt], params))
    with pytest.raises(RequestError, match=f"allowed: {MAX_LEN - 1} and one to generate"):
        engine.submit(Request(4, prompt, SamplingParams(max_tokens=1)))


def test_if_decodes_use_all_logits_rows_a_prompt_advances_token_by_token(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(max_rows=6)
    short = [Request(i, [5, 6], SamplingParams(max_tokens=30, ignore_eos=True)) for i in range(5)]
    scored = SamplingParams(max_tokens=2, num_prompt_logprobs=0, ignore_eos=True)
    rows: list[int] = []
    launch = engine.runner.launch

    def counted(batch: Batch) -> PendingStep:
        rows.append(sum(c.num_scores + c.num_drafts + c.samples for c in batch.chunks))
        return launch(batch)

    engine.runner.launch = counted  # type: ignore[method-assign]
    events = run(engine, [*short, Request(9, list(range(3, 63)), scored)])
    assert max(rows) == 6
    assert len(prompt_candidates(events[9])) == 60
    assert [sum(len(event.token_ids) for event in events[i]) for i in range(5)] == [30] * 5


def test_a_prompt_that_is_not_finite_inside_fails_alone(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    """At once, not when its last token is chosen after."""
    weights = tiny.random_weights(tiny.SETTINGS | SHAPE)
    weights["model.embed_tokens.weight"][7] = float("nan")
    engine = make_engine(tiny.write_llama(tmp_path, weights, **SHAPE), max_prefill_chunk=8)
    params = SamplingParams(max_tokens=1, num_prompt_logprobs=1)
    engine.submit(Request(1, [*range(20, 30), 7, *range(30, 60)], params))
    engine.submit(Request(2, list(range(30, 60)), params))
    events: list[TokenEvent] = []
    while engine.has_work:
        events += engine.step()
    (failed,) = (event for event in events if event.error is not None)
    assert failed.request_id == 1
    assert "not finite" in str(failed.error)
    assert len(prompt_candidates([event for event in events if event.request_id == 1])) <= 11
    assert len(prompt_candidates([event for event in events if event.request_id == 2])) == 30
    assert events.index(failed) < len(events) - 1
