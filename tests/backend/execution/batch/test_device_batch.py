"""The diffs sent to a GPU reproduce each step, with little redundancy.

The kernels that apply them are replaced by their torch definitions, so no GPU is needed; the
kernels are tested in tests/kernels/gpu/test_batch_state.py.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch

from inflight.config import EngineConfig, SpeculativeConfig
from inflight.core.batch import Batch, Chunk, StepOutput
from inflight.core.kernel_blocks import KernelBlocks
from inflight.core.request import Request
from inflight.core.sequence import Sequence
from inflight.core.step_size import StepSize
from inflight.engine.engine import Engine, generate
from inflight.execution.batch import device_batch
from inflight.execution.batch.device_batch import (
    BatchLimits,
    DeviceBatch,
    SubmittedStep,
)
from inflight.execution.batch.step_upload import SamplerStages
from inflight.kv.layout import KVTable, KVTables
from inflight.sampling.params import SamplingParams
from inflight.scheduling.draft_budget import StepCosts, StepTimes
from inflight_kernels.ops import sampling
from inflight_kernels.ops.batch_state import FROM_DEVICE
from thinned import thinned

BLOCK_SIZE = 4
VOCAB_SIZE = 100
MAX_LEN = 64
MAX_DRAFTS = 4

# The last block of the first table may reach beyond the longest sequence.
WINDOWED = (KVTable(kernel_blocks=3), KVTable(window=6, tile_tokens=2))
WIDE = (KVTable(), KVTable(window=20, tile_tokens=2))


@pytest.fixture(autouse=True, scope="module")
def _no_kernels() -> Iterator[None]:
    def upload(source, step, *, pdl):
        step.copy_(source)

    def write_tables(places, blocks, tables):
        tables.view(-1)[places.long()] = blocks

    def write_row_params(slots, news, row_params):
        row_params[slots.long()] = news

    def copy_blocks(cache, sources, targets):
        cache[targets.long()] = cache[sources.long()].clone()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(device_batch.batch_state, "upload", upload)
        patched.setattr(device_batch.batch_state, "write_tables", write_tables)
        patched.setattr(device_batch.batch_state, "write_row_params", write_row_params)
        patched.setattr(device_batch.cache, "copy_blocks", copy_blocks)
        yield


class CheckingRunner:
    """Sends each batch, takes it apart again and does what the kernels do at both ends of a step.

    Tokens follow from all those before them. Steps run when they are launched, and their results
    are handed out as late as a GPU's.
    """

    def __init__(
        self, num_blocks: int, max_num_seqs: int, steps_ahead: int, tables: tuple[KVTable, ...]
    ) -> None:
        self.num_blocks = num_blocks
        self.kv_tables = KVTables(tables, BLOCK_SIZE)
        self.block_size = BLOCK_SIZE
        self.vocab_size = VOCAB_SIZE
        self.max_rows = max_num_seqs + MAX_DRAFTS * max_num_seqs
        self.steps_ahead = steps_ahead
        self.step_costs = StepCosts(StepTimes((1, 64), (1.0, 1.0)))
        self.supports_host_drafts = True
        self.host_memory = None
        limits = BatchLimits(
            max_num_seqs,
            64,
            MAX_LEN // BLOCK_SIZE,
            self.max_rows,
            max_drafts=MAX_DRAFTS,
            history_length=MAX_LEN,
            num_tables=len(tables),
        )
        self.device = DeviceBatch(limits, VOCAB_SIZE, torch.device("cpu"))
        splits = [KernelBlocks(table.kernel_blocks, num_blocks) for table in tables]
        self.device.kernel_blocks = tuple(splits)
        # The token that was written, by the number of the kernel block in its block.
        most = max(split.count for split in splits)
        self.caches = torch.full((most, num_blocks, BLOCK_SIZE), -1)
        self.num_from_device = 0
        self.num_accepted = 0
        self.num_scored = 0

    def forget(self, sequence: Sequence) -> None:
        pass

    def launch(self, batch: Batch) -> Step:
        step, state = self.device.step, self.device.state
        size = StepSize.of(batch)
        num_chunks, num_tokens = size.num_chunks, size.num_tokens
        bucket = StepSize(
            num_tokens + 9, min(num_chunks + 2, len(step.slots)), size.num_rows + 1, 64
        )
        sent = self.device.send(batch, size, *self.caches, bucket=bucket)
        assert sent.size == size
        assert [num_chunks, num_tokens, size.num_rows] == step.header[[0, 2, 3]].tolist()
        assert size.num_rows == sent.row_start[-1]
        query_start = step.query_start.tolist()
        spare = range(num_chunks, bucket.num_chunks + 1)
        assert all(query_start[chunk] == num_tokens for chunk in spare)
        for i, chunk in enumerate(batch.chunks):
            rows = range(*step.row_start[i : i + 2].tolist())
            if chunk.num_scores:
                self._check_scores(sent, chunk, rows)
                rows = rows[chunk.num_scores :]
            assert (step.given[rows.start : rows.stop] == -1).all()
            chooses = chunk.samples or not chunk.num_scores  # one of a prompt's last row is unused
            assert len(rows) == (1 + chunk.num_drafts if chooses else 0)
            slot, start = int(step.slots[i]), int(step.starts[i])
            tokens = step.tokens[query_start[i] : query_start[i + 1]].tolist()
            assert len(tokens) == chunk.length
            if start == FROM_DEVICE:
                self.num_from_device += 1
                assert tokens[0] == FROM_DEVICE
                start = int(state.last_positions[slot])
                tokens[0] = int(state.last_tokens[slot])
            else:
                assert start == chunk.start
            drafts = state.drafts[slot].tolist()[: chunk.num_drafts]
            first_draft = len(tokens) - len(drafts)
            assert tokens[first_draft:] == [FROM_DEVICE] * len(drafts)
            tokens[first_draft:] = [max(draft, 0) for draft in drafts]
            known = chunk.sequence.token_ids[: start + len(tokens) - len(drafts)]
            for index in reversed(range(len(self.kv_tables.tables))):
                history = self._write_and_read(index, slot, start, tokens)
                first = self.kv_tables.tables[index].first_kept(start)
                seen = history[first : len(known)]
                assert seen == known[first:], "the cache holds what the sequence is"
            # Of the first table, which keeps all tokens.
            self._check_row_params(slot, chunk)
            assert int(step.sample_slots[i]) == (slot if chunk.samples else -1)
            if chunk.samples:
                self._end(sent, i, rows, slot, history)
            else:
                state.results[sent.ring_index][3, i] = 0
        return Step(self.device, batch, sent)

    def _write_and_read(self, index: int, slot: int, start: int, tokens: list[int]) -> list[int]:
        """Write a chunk's tokens where a table says; all of the sequence that it has then."""
        cache = self.caches.flatten(0, 1)
        table = self.device.state.by_table[index].tables[slot].tolist()
        for position, token in enumerate(tokens, start):
            cache[table[position // BLOCK_SIZE], position % BLOCK_SIZE] = token
        end = start + len(tokens)
        found: list[int] = cache[table[: -(-end // BLOCK_SIZE)]].flatten()[:end].tolist()
        return found

    def _check_scores(self, sent: SubmittedStep, chunk: Chunk, rows: range) -> None:
        """The first rows are of tokens that have a next one, in the prompt."""
        step = self.device.step
        first = chunk.end - len(rows) + 1
        expected = chunk.sequence.request.prompt_ids[first : first + chunk.num_scores]
        scored = slice(rows.start, rows.start + chunk.num_scores)
        assert step.given[scored].tolist() == expected
        assert len(expected) == chunk.num_scores
        wanted = chunk.sequence.request.params.num_prompt_logprobs
        assert step.num_top_logprobs[scored].tolist() == [wanted] * chunk.num_scores
        assert SamplerStages.TOP_LOGPROBS in sent.stages
        self.num_scored += chunk.num_scores

    def _check_row_params(self, slot: int, chunk: Chunk) -> None:
        sampled = self.device.state.row_params[slot].numpy().view(sampling.ROW_PARAMS)[0]
        params = chunk.sequence.request.params
        assert sampled["seed"] == chunk.sequence.seed
        assert sampled["temperature"] == pytest.approx(params.effective_temperature)
        assert sampled["slot"] == (slot if params.has_penalties else -1)

    def _end(
        self, sent: SubmittedStep, chunk: int, rows: range, slot: int, tokens: list[int]
    ) -> None:
        """Verify, keep, report; then draft, mostly correct tokens."""
        state = self.device.state
        result = state.results[sent.ring_index]
        known = len(tokens) - len(rows) + 1
        for count, row in enumerate(rows):
            chosen = follows(tokens[: known + count])
            result[:3, row] = torch.tensor([chosen, 0, sampling.OK])
            state.history[slot, known + count] = chosen
            if count + 1 == len(rows) or tokens[known + count] != chosen:
                break
        result[3, chunk] = 1 + count
        self.num_accepted += count
        state.last_tokens[slot], state.last_positions[slot] = chosen, known + count
        history = state.history[slot, : known + count + 1].tolist()
        assert history == [*tokens[: known + count], chosen], "the history is the sequence"
        for i in range(MAX_DRAFTS):
            guess = follows(history)
            history.append(guess if guess % 5 else (guess + 1) % VOCAB_SIZE)
            state.drafts[slot, i] = history[-1]


def follows(tokens: list[int]) -> int:
    return sum(tokens) * 31 % VOCAB_SIZE


class Step:
    def __init__(self, device: DeviceBatch, batch: Batch, sent: SubmittedStep) -> None:
        self._device, self._batch, self._sent = device, batch, sent

    def result(self) -> StepOutput:
        output = StepOutput([], [])
        chosen = self._device.results(self._batch, self._sent)
        for index, (chunk, found) in enumerate(zip(self._batch.chunks, chosen, strict=True)):
            output.token_ids.append(found.token_ids if chunk.samples else [])
            output.logprobs.append(found.logprobs if chunk.samples else [])
            if chunk.num_drafts:
                output.num_drafted[index] = chunk.num_drafts
        return output


def make_engine(steps_ahead: int, **changes: object) -> Engine:
    settings: dict[str, object] = {
        "num_blocks": 60,
        "max_num_seqs": 6,
        "enable_prefix_caching": False,
    }
    settings |= changes
    tables = settings.pop("tables", (KVTable(),))
    if "drafts" in settings:
        drafts = settings.pop("drafts")
        settings["speculative_config"] = SpeculativeConfig(
            num_speculative_tokens=MAX_DRAFTS, default=drafts
        )  # type: ignore[arg-type]
    config = EngineConfig(model=".", block_size=BLOCK_SIZE, max_num_batched_tokens=64, **settings)  # type: ignore[arg-type]
    runner = CheckingRunner(
        settings["num_blocks"],  # type: ignore[arg-type]
        settings["max_num_seqs"],  # type: ignore[arg-type]
        steps_ahead,
        tables,  # type: ignore[arg-type]
    )
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


def with_scores(request: Request) -> Request:
    params = msgspec.structs.replace(request.params, num_prompt_logprobs=2)
    return msgspec.structs.replace(request, params=params)


@pytest.fixture(scope="module")
def wanted() -> dict[int, list[int]]:
    """Outputs of 40 requests, of an engine that never sends a step ahead."""
    return generate(make_engine(0), requests(40))


@pytest.mark.parametrize(
    ("steps_ahead", "settings"),
    thinned(
        # With a step ahead first: each way once with it, as engines run.
        [pytest.param(1, id="1"), pytest.param(0, id="0")],
        [
            pytest.param({"num_blocks": 20}, id="preemption"),
            pytest.param({}, id="plain"),
            pytest.param({"drafts": 4}, id="drafts"),
            pytest.param({"max_prefill_chunk": 3}, id="chunks"),
            pytest.param(
                {"drafts": 2, "num_blocks": 20, "enable_prefix_caching": True},
                id="drafts, preemption",
            ),
            pytest.param({"enable_prefix_caching": True}, id="prefixes"),
            pytest.param({"tables": WIDE, "num_blocks": 30}, id="windows, preemption"),
            pytest.param({"drafts": "auto", "max_draft_tokens": 7}, id="drafts as they pay"),
            pytest.param(
                {"tables": WINDOWED, "drafts": 3, "enable_prefix_caching": True},
                id="windows, prefixes, drafts",
            ),
        ],
        one_in=2,
    ),
)
def test_each_step_arrives_as_it_was_meant(
    wanted: dict[int, list[int]], steps_ahead: int, settings: dict[str, object]
) -> None:
    engine = make_engine(steps_ahead, **settings)
    assert generate(engine, requests(40)) == wanted
    scored = make_engine(steps_ahead, **settings)
    given = [one if one.request_id % 3 else with_scores(one) for one in requests(40)]
    assert generate(scored, given) == wanted
    least = sum(len(one.prompt_ids) - 1 for one in given if not one.request_id % 3)
    assert scored.runner.num_scored >= least  # type: ignore[attr-defined]
    if "num_blocks" in settings:
        assert engine.scheduler.num_preemptions > 0
    assert isinstance(engine.runner, CheckingRunner)
    assert bool(engine.runner.num_from_device) == bool(steps_ahead)
    assert bool(engine.runner.num_accepted) == ("drafts" in settings)
    stats = engine.stats()
    assert stats.num_accepted_tokens <= stats.num_drafted_tokens


def test_a_slot_is_given_to_the_next_sequence_when_its_own_has_ended() -> None:
    engine = make_engine(1, max_num_seqs=2)
    generate(engine, requests(30))
    generate(engine, [Request(100 + r.request_id, r.prompt_ids, r.params) for r in requests(5)])


def test_banned_tokens_are_listed_by_row() -> None:
    engine = make_engine(1)
    engine.admission.eos_token_ids = frozenset({7, 11})
    device = engine.runner.device  # type: ignore[attr-defined]
    for request in requests(3, min_tokens=1):
        engine.submit(request)
    batch = engine.scheduler.schedule()
    sent = device.send(batch, StepSize.of(batch), *engine.runner.caches)  # type: ignore[attr-defined]
    bias = sent.logit_bias
    assert bias is not None
    assert device.step.bias_starts[:4].tolist() == [0, 2, 4, 6]
    assert [set(pair) for pair in bias.token_ids.view(3, 2).tolist()] == [{7, 11}] * 3
    assert bias.biases.tolist() == [-math.inf] * 6
    later = engine.scheduler.schedule()
    assert device.send(later, StepSize.of(later), *engine.runner.caches).logit_bias is None  # type: ignore[attr-defined]


@pytest.mark.parametrize("bucket", [0, 7, 40])
def test_more_changes_than_there_is_room_for_arrive_all_the_same(
    bucket: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = generate(make_engine(0), requests(20))
    monkeypatch.setattr(device_batch, "_UPDATE_WORDS", bucket)
    assert generate(make_engine(1, enable_prefix_caching=True), requests(20)) == wanted


def test_any_number_of_tokens_may_be_banned() -> None:
    engine = make_engine(1)
    engine.admission.eos_token_ids = frozenset(range(0, VOCAB_SIZE, 2))
    device = engine.runner.device  # type: ignore[attr-defined]
    device_room = len(device.step.tokens)
    engine.admission.eos_token_ids |= frozenset(range(VOCAB_SIZE, VOCAB_SIZE + device_room))
    for request in requests(2, min_tokens=1):
        engine.submit(request)
    batch = engine.scheduler.schedule()
    sent = device.send(batch, StepSize.of(batch), *engine.runner.caches)  # type: ignore[attr-defined]
    assert sent.logit_bias is not None
    assert set(sent.logit_bias.token_ids.tolist()) == engine.eos_token_ids


@pytest.mark.parametrize(
    ("params", "stages"),
    [
        ({}, SamplerStages.NONE),
        ({"temperature": 1.0}, SamplerStages.NONE),
        ({"top_k": 5, "temperature": 0.0}, SamplerStages.NONE),
        ({"top_k": 5}, SamplerStages.FILTERS),
        ({"top_p": 0.9}, SamplerStages.FILTERS),
        ({"min_p": 0.1}, SamplerStages.FILTERS),
        ({"typical_p": 0.5}, SamplerStages.FILTERS | SamplerStages.RARE_FILTERS),
        ({"presence_penalty": 0.5}, SamplerStages.PENALTIES),
        ({"allowed_token_ids": (3, 64, 99)}, SamplerStages.MASKS),
        ({"num_logprobs": 0}, SamplerStages.TOP_LOGPROBS),
    ],
)
def test_a_step_lists_the_sampler_stages_that_it_needs(
    params: dict[str, object], stages: SamplerStages, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[int] = []
    monkeypatch.setattr(
        sampling, "mark_prompt_tokens", lambda slots, ids, *_: noted.extend(ids.tolist())
    )
    monkeypatch.setattr(sampling, "count_output_tokens", lambda *_: None)
    engine = make_engine(1)
    (request,) = requests(1, **params)
    engine.submit(request)
    batch = engine.scheduler.schedule()
    device = engine.runner.device  # type: ignore[attr-defined]
    sent = device.send(batch, StepSize.of(batch), *engine.runner.caches)  # type: ignore[attr-defined]
    assert sent.stages == stages
    assert noted == (list(request.prompt_ids) if stages & SamplerStages.PENALTIES else [])
    slot = int(device.step.slots[0])
    if stages & SamplerStages.MASKS:
        assert int(device.step.mask_rows[0]) == slot
        bits = np.unpackbits(device.masks[slot].numpy().view(np.uint8), bitorder="little")
        assert np.flatnonzero(bits).tolist() == [3, 64, 99]
    if stages & SamplerStages.TOP_LOGPROBS:
        assert int(device.step.num_top_logprobs[0]) == 0


def test_host_drafts_are_sent_with_the_mask_after_each() -> None:
    engine = make_engine(0, drafts=3)
    (request,) = requests(1, no_repeat_ngram_size=2)
    request = msgspec.structs.replace(request, prompt_ids=[1, 2, 1, 3])
    engine.submit(request)
    engine.step()
    batch = engine.scheduler.schedule()
    (chunk,) = batch.chunks
    assert chunk.num_drafts == 3
    chosen = chunk.sequence.token_ids[-1]
    device = engine.runner.device  # type: ignore[attr-defined]
    sent = device.send(batch, StepSize.of(batch), *engine.runner.caches, drafts=[[1, 3, 2]])  # type: ignore[attr-defined]
    assert device.step.tokens[:4].tolist() == [chosen, 1, 3, 2]
    starts = device.step.bias_starts[:5].tolist()
    banned = [set(sent.logit_bias.token_ids[a:b].tolist()) for a, b in itertools.pairwise(starts)]
    # After "... chosen": nothing that ever followed it; after a draft of 1: 2 and 3; and so on.
    assert banned[1] == {2, 3}
    assert banned[2] == ({chosen} if chosen not in (1, 2) else set())
    assert banned[3] == {1}


def test_masks_are_at_their_rows_indices() -> None:
    engine = make_engine(0, drafts=2)
    for request in requests(3):
        engine.submit(request)
    engine.step()
    batch = engine.scheduler.schedule()
    grammatical = batch.chunks[1].sequence
    grammatical.grammar = object()
    device = engine.runner.device  # type: ignore[attr-defined]
    device._residents.clear()
    device._free = list(range(6))
    num_drafts = batch.chunks[1].num_drafts
    assert num_drafts > 0
    drafts = [[], [5] * num_drafts, []]
    sent = device.send(batch, StepSize.of(batch), *engine.runner.caches, drafts=drafts)  # type: ignore[attr-defined]
    assert sent.stages == SamplerStages.MASKS

    class Masks:
        def of_row(self, index: int, count: int) -> np.ndarray | None:
            words = sampling.prompt_words(VOCAB_SIZE)
            return np.full(words, 10 * index + count, np.int32) if index == 1 else None

    device.send_masks(batch, Masks())
    places = device.step.mask_rows[: sent.size.num_rows].tolist()
    own = places[sent.row_start[1] : sent.row_start[2]]
    assert [int(device.masks[place, 0]) for place in own] == [10, 11, 12][: 1 + num_drafts]
    assert places.count(-1) == len(places) - len(own)


def test_adjustments_apply_to_the_row_after_the_prompt() -> None:
    """Rows in which the prompt's own token is looked at have no mask and no bias."""
    engine = make_engine(0, max_prefill_chunk=4)
    (request,) = requests(1, num_prompt_logprobs=3, num_logprobs=1, logit_bias=((9, 1.5),))
    engine.submit(msgspec.structs.replace(request, prompt_ids=[1, 2, 3, 4, 5, 6, 7]))
    device, cache = engine.runner.device, engine.runner.caches  # type: ignore[attr-defined]
    inner = engine.scheduler.schedule()
    inner.chunks[0].sequence.grammar = object()
    last = engine.scheduler.schedule()

    class Masks:
        def of_row(self, index: int, count: int) -> np.ndarray:
            assert (index, count) == (0, 0)
            return np.full(sampling.prompt_words(VOCAB_SIZE), 11, np.int32)

    sent = device.send(inner, StepSize.of(inner), cache)
    assert (sent.row_start, sent.logit_bias) == ([0, 4], None)
    device.send_masks(inner, Masks())
    assert device.step.given[:4].tolist() == [2, 3, 4, 5]
    assert device.step.mask_rows[:4].tolist() == [-1] * 4
    assert device.step.num_top_logprobs[:4].tolist() == [3] * 4
    assert not device.masks.any()

    sent = device.send(last, StepSize.of(last), cache)
    assert sent.row_start == [0, 3]
    device.send_masks(last, Masks())
    assert device.step.given[:3].tolist() == [6, 7, -1]
    assert device.step.num_top_logprobs[:3].tolist() == [3, 3, 1]
    assert device.step.bias_starts[:4].tolist() == [0, 0, 0, 1]
    *others, place = device.step.mask_rows[:3].tolist()
    assert others == [-1, -1]
    assert int(device.masks[place, 0]) == 11
