"""What is sent to a GPU of each step is what the step is, with little of it said twice.

The kernels that take it in are stood in for by their definitions in torch, so this needs no GPU;
that the kernels do the same is tests/kernels/gpu/test_batch_state.py.
"""

from __future__ import annotations

import random

import pytest
import torch

from inflight import device_batch
from inflight.batch import Batch, Done, StepOutput
from inflight.config import EngineConfig
from inflight.device_batch import DeviceBatch
from inflight.engine import Engine, generate
from inflight.request import Request
from inflight.sampling import SamplingParams
from inflight_kernels import sampling
from inflight_kernels.batch_state import FROM_DEVICE

BLOCK_SIZE = 4
VOCAB_SIZE = 100
MAX_LEN = 64


@pytest.fixture(autouse=True)
def _no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def write_tables(places, blocks, tables):
        tables.view(-1)[places.long()] = blocks

    def write_wishes(slots, news, wishes):
        wishes[slots.long()] = news

    def copy_blocks(cache, sources, targets):
        cache[targets.long()] = cache[sources.long()].clone()

    monkeypatch.setattr(device_batch.batch_state, "write_tables", write_tables)
    monkeypatch.setattr(device_batch.batch_state, "write_wishes", write_wishes)
    monkeypatch.setattr(device_batch.cache, "copy_blocks", copy_blocks)


class CheckingRunner:
    """Sends each batch and takes it apart again; tokens follow from a sequence's length.

    Steps run when they are launched, and their results are handed out as late as a GPU's.
    """

    def __init__(self, num_blocks: int, max_num_seqs: int, steps_ahead: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = BLOCK_SIZE
        self.vocab_size = VOCAB_SIZE
        self.steps_ahead = steps_ahead
        self.device = DeviceBatch(
            max_num_seqs, 64, MAX_LEN // BLOCK_SIZE, VOCAB_SIZE, torch.device("cpu")
        )
        self.cache = torch.full((num_blocks, BLOCK_SIZE), -1)  # the token that was written
        self.num_from_device = 0

    def launch(self, batch: Batch) -> Done:
        num_rows = min(len(batch.chunks) + 2, len(self.device.step.slots))
        spare = num_rows - len(batch.chunks)
        sent = self.device.send(batch, num_rows, self.cache)
        step, state = self.device.step, self.device.state
        assert sent.num_chunks == len(batch.chunks) == int(step.header[0])
        starts = step.query_start.tolist()
        assert starts[sent.num_chunks : num_rows + 1] == [sent.num_tokens] * (spare + 1)
        assert step.seq_lens[sent.num_chunks : num_rows].tolist() == [0] * spare
        token_ids = []
        for i, chunk in enumerate(batch.chunks):
            slot, end = int(step.slots[i]), int(step.seq_lens[i])
            tokens = step.tokens[starts[i] : starts[i + 1]].tolist()
            assert (end, len(tokens)) == (chunk.end, chunk.length)
            if tokens[0] == FROM_DEVICE:
                self.num_from_device += 1
                tokens = [int(state.last_tokens[slot])]
            for offset, token in enumerate(tokens):
                block = int(state.tables[slot, (chunk.start + offset) // BLOCK_SIZE])
                self.cache[block, (chunk.start + offset) % BLOCK_SIZE] = token
            seen = state.tables[slot, : -(-end // BLOCK_SIZE)].long()
            history = self.cache[seen].flatten()[:end].tolist()
            known = chunk.sequence.token_ids[:end]
            assert history[: len(known)] == known, "the cache holds what the sequence is"
            wish = state.wishes[slot].numpy().view(sampling.WISH)[0]
            params = chunk.sequence.request.params
            assert wish["seed"] == chunk.sequence.seed
            assert wish["temperature"] == pytest.approx(params.effective_temperature)
            assert wish["slot"] == (slot if params.has_penalties else -1)
            assert int(step.sample_slots[i]) == (slot if chunk.samples else -1)
            if chunk.samples:
                chosen = sum(history) * 31 % VOCAB_SIZE
                state.last_tokens[slot] = chosen
                token_ids.append([chosen])
            else:
                token_ids.append([])
        return Done(StepOutput(token_ids, [[0.0] * len(ids) for ids in token_ids]))


def make_engine(steps_ahead: int, **changes: object) -> Engine:
    settings: dict[str, object] = {"num_blocks": 60, "max_num_seqs": 6, "prefix_cache": False}
    settings |= changes
    config = EngineConfig(model=".", block_size=BLOCK_SIZE, max_batch_tokens=64, **settings)  # type: ignore[arg-type]
    runner = CheckingRunner(settings["num_blocks"], settings["max_num_seqs"], steps_ahead)  # type: ignore[arg-type]
    return Engine(config, runner, MAX_LEN, eos_token_ids=[7])


def requests(count: int, **params: object) -> list[Request]:
    generator = random.Random(count)
    return [
        Request(
            index,
            [generator.randrange(VOCAB_SIZE) for _ in range(generator.randint(1, 30))],
            SamplingParams(max_tokens=generator.randint(1, 30), seed=index, **params),  # type: ignore[arg-type]
        )
        for index in range(count)
    ]


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="plain"),
        pytest.param({"num_blocks": 20}, id="preemption"),
        pytest.param({"prefix_cache": True}, id="prefixes"),
        pytest.param({"max_prefill_chunk": 3}, id="chunks"),
    ],
)
def test_each_step_arrives_as_it_was_meant(steps_ahead: int, settings: dict[str, object]) -> None:
    wanted = generate(make_engine(0), requests(40))
    engine = make_engine(steps_ahead, **settings)
    assert generate(engine, requests(40)) == wanted
    if "num_blocks" in settings:
        assert engine.scheduler.num_preemptions > 0
    assert isinstance(engine.runner, CheckingRunner)
    assert bool(engine.runner.num_from_device) == bool(steps_ahead)


def test_a_slot_is_given_to_the_next_sequence_when_its_own_has_ended() -> None:
    engine = make_engine(1, max_num_seqs=2)
    generate(engine, requests(30))
    generate(engine, [Request(100 + r.request_id, r.prompt_ids, r.params) for r in requests(5)])


def test_tokens_that_may_not_be_chosen_are_listed_by_chunk() -> None:
    engine = make_engine(1)
    engine.eos_token_ids = frozenset({7, 11})
    device = engine.runner.device  # type: ignore[attr-defined]
    for request in requests(3, min_tokens=1):
        engine.submit(request)
    batch = engine.scheduler.schedule()
    sent = device.send(batch, len(batch.chunks), engine.runner.cache)  # type: ignore[attr-defined]
    assert sent.bans is not None
    assert device.step.ban_starts[:4].tolist() == [0, 2, 4, 6]
    assert [set(pair) for pair in sent.bans.view(3, 2).tolist()] == [{7, 11}] * 3
    later = engine.scheduler.schedule()
    assert device.send(later, len(later.chunks), engine.runner.cache).bans is None  # type: ignore[attr-defined]


@pytest.mark.parametrize("room", [0, 7, 40])
def test_more_changes_than_there_is_room_for_arrive_all_the_same(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = generate(make_engine(0), requests(20))
    monkeypatch.setattr(device_batch, "_UPDATE_WORDS", room)
    assert generate(make_engine(1, prefix_cache=True), requests(20)) == wanted


def test_any_number_of_tokens_may_be_banned() -> None:
    engine = make_engine(1)
    engine.eos_token_ids = frozenset(range(0, VOCAB_SIZE, 2))
    device = engine.runner.device  # type: ignore[attr-defined]
    device_room = len(device.step.tokens)
    engine.eos_token_ids |= frozenset(range(VOCAB_SIZE, VOCAB_SIZE + device_room))
    for request in requests(2, min_tokens=1):
        engine.submit(request)
    batch = engine.scheduler.schedule()
    sent = device.send(batch, len(batch.chunks), engine.runner.cache)  # type: ignore[attr-defined]
    assert sent.bans is not None
    assert set(sent.bans.tolist()) == engine.eos_token_ids


@pytest.mark.parametrize(
    ("params", "filters", "penalties"),
    [
        ({}, False, False),
        ({"temperature": 1.0}, False, False),
        ({"top_k": 5}, True, False),
        ({"top_p": 0.9}, True, False),
        ({"min_p": 0.1}, True, False),
        ({"presence_penalty": 0.5}, False, True),
    ],
)
def test_a_step_says_what_its_choices_need(
    params: dict[str, float], filters: bool, penalties: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[int] = []
    monkeypatch.setattr(sampling, "note_prompt", lambda slots, ids, *_: noted.extend(ids.tolist()))
    monkeypatch.setattr(sampling, "note_output", lambda *_: None)
    engine = make_engine(1)
    (request,) = requests(1, **params)
    engine.submit(request)
    batch = engine.scheduler.schedule()
    sent = engine.runner.device.send(batch, 1, engine.runner.cache)  # type: ignore[attr-defined]
    assert (sent.has_filters, sent.has_penalties) == (filters, penalties)
    assert noted == (list(request.prompt_ids) if penalties else [])
