"""A step expanded on the device matches the host's batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from inflight_kernels.ops.batch_state import (
    FROM_DEVICE,
    NO_DRAFT,
    NOT_DRAFTED,
    BatchState,
    StateSizes,
    Step,
    StepLayout,
    begin_step,
    end_step,
    upload,
    write_row_params,
    write_tables,
)
from inflight_kernels.ops.sampling import ROW_PARAMS

pytestmark = pytest.mark.gpu

BLOCK_SIZE = 16
WIDTH = 40
SLOTS = 12
NUM_DRAFTS = 5
HISTORY = 700
LAYOUT = StepLayout(max_rows=24, max_tokens=2048)
WORDS = ROW_PARAMS.itemsize // 4
SLOT = ROW_PARAMS.fields["slot"][1] // 4
POISON = -77


def make_state(history: int = HISTORY, num_tables: int = 1) -> BatchState:
    sizes = StateSizes(SLOTS, WIDTH, 3, NUM_DRAFTS, history, num_tables)
    state = BatchState(LAYOUT, sizes, "cuda")
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(tensor: torch.Tensor, high: int) -> None:
        tensor.copy_(torch.randint(0, high, tensor.shape, generator=generator, device="cuda"))

    draw(state.all_tables, 10**6)
    draw(state.last_tokens, 128_000)
    draw(state.last_positions, 500)
    draw(state.drafts, 128_000)
    state.drafts[:, 3] = -1  # missing
    draw(state.row_params, 10**9)
    for table in state.by_table:
        table.slot_mapping.fill_(POISON)
        table.step_tables.fill_(POISON)
    for written in (state.token_ids, state.positions, state.sample_rows):
        written.fill_(POISON)
    for written in (
        state.step_row_params,
        state.sample_positions,
        state.seq_lens,
    ):
        written.fill_(POISON)
    for written in (state.count_slots, state.tail_starts, state.tail_lengths):
        written.fill_(POISON)
    return state


@dataclass
class Part:
    """A chunk as a test means it."""

    slot: int
    start: int | None  # None: the device knows
    length: int
    samples: bool = True
    num_drafts: int = 0
    num_scores: int = 0

    @property
    def num_rows(self) -> int:
        """Of logits; one at least."""
        return self.num_scores + (1 + self.num_drafts if self.samples or not self.num_scores else 0)


def send(parts: list[Part]) -> tuple[Step, np.ndarray]:
    """A step on the device, and its tokens."""
    random = np.random.default_rng(len(parts))
    query_start = np.cumsum([0, *[part.length for part in parts]])
    tokens = random.integers(0, 128_000, query_start[-1]).astype(np.int32)
    for part, first, end in zip(parts, query_start, query_start[1:], strict=False):
        if part.start is None:
            tokens[first] = FROM_DEVICE
        tokens[end - part.num_drafts : end] = FROM_DEVICE
    row_start = np.cumsum([0, *[part.num_rows for part in parts]])
    given = [row < part.num_scores for part in parts for row in range(part.num_rows)]
    host = np.zeros(LAYOUT.size, np.int32)
    arrays = {
        "header": [len(parts), 2, query_start[-1], row_start[-1]],
        "slots": [part.slot for part in parts],
        "sample_slots": [part.slot if part.samples else -1 for part in parts],
        "starts": [FROM_DEVICE if part.start is None else part.start for part in parts],
        "query_start": [*query_start, *[query_start[-1]] * (LAYOUT.max_rows - len(parts))],
        "row_start": row_start,
        "given": np.where(given, random.integers(0, 128_000, len(given)), -1),
        "tokens": tokens,
    }
    for name, values in arrays.items():
        first, _ = LAYOUT.offsets[name]
        host[first : first + len(values)] = values
    step = Step(LAYOUT, "cuda")
    step.buffer.copy_(torch.from_numpy(host))
    return step, tokens


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([Part(7, None, 1), Part(0, 37, 1, False), Part(11, 15, 1)], id="decode"),
        pytest.param([Part(7, 0, 1), Part(0, 0, 33), Part(11, 16, 600, False)], id="prompts"),
        pytest.param(
            [Part(7, None, 6, True, 5), Part(3, None, 1), Part(2, 9, 3, True, 2)], id="drafts"
        ),
        pytest.param([Part(5, 600, 40)], id="one"),
        pytest.param(
            [Part(5, 16, 9, False, 0, 9), Part(3, 0, 40, True, 0, 6), Part(2, 9, 1, False)],
            id="scores",
        ),
    ],
)
def test_tokens_positions_slots_and_rows(parts: list[Part]) -> None:
    state = make_state()
    step, tokens = send(parts)
    begin_step(step, state, len(parts), BLOCK_SIZE)
    tables, last = state.tables.cpu().numpy(), state.last_tokens.cpu().numpy()
    row_params, drafts = state.row_params.cpu().numpy(), state.drafts.cpu().numpy()
    token = row = 0
    for chunk, part in enumerate(parts):
        start = int(state.last_positions[part.slot]) if part.start is None else part.start
        positions = np.arange(start, start + part.length)
        own = slice(token, token + part.length)
        expected = tokens[own].astype(np.int64)
        if part.start is None:
            expected[0] = last[part.slot]
        if part.num_drafts:
            expected[-part.num_drafts :] = np.maximum(drafts[part.slot, : part.num_drafts], 0)
        assert state.token_ids[own].tolist() == expected.tolist()
        assert state.positions[own].tolist() == positions.tolist()
        blocks = tables[part.slot, positions // BLOCK_SIZE].astype(np.int64)
        slots = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
        assert state.slot_mapping[own].tolist() == slots.tolist()
        token += part.length
        assert state.seq_lens[chunk] == start + part.length
        used = -(-(start + part.length) // BLOCK_SIZE)
        table = state.step_tables[chunk].cpu().numpy()
        assert table[:used].tolist() == tables[part.slot, :used].tolist()
        assert (table[used:] == POISON).all()
        for i in range(part.num_rows):
            place = token - part.num_rows + i
            assert state.sample_rows[row] == place
            assert state.sample_positions[row] == positions[-1] - part.num_rows + i + 2
            expected_params = row_params[part.slot].tolist()
            if i < part.num_scores:  # greedy, and no penalties: nothing that costs time
                expected_params = [-1 if word == SLOT else 0 for word in range(WORDS)]
            assert state.step_row_params[row].tolist() == expected_params
            assert state.tail_lengths[row] == (0 if part.num_scores else i)
            if part.num_drafts:
                assert state.tail_starts[row] == token - part.num_drafts
            row += 1
    for untouched in (
        state.token_ids[token:],
        state.step_row_params[row:],
        state.seq_lens[len(parts) :],
    ):
        assert (untouched == POISON).all()


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([Part(4, 10, 1), Part(9, None, 1)], id="decode"),
        pytest.param([Part(4, None, 4, True, 3), Part(9, None, 1)], id="drafts"),
        pytest.param([Part(4, 10, 30), Part(9, None, 1)], id="prompt"),
        pytest.param([Part(4, 0, 9, True, 0, 6)], id="scores"),
    ],
)
@pytest.mark.parametrize(
    ("more_chunks", "more_tokens", "more_rows"),
    [(3, 3, 3), (0, 700, 0), (1, 2000, 17), (0, 1, 1), (9, 0, 0)],
)
def test_graph_padding_belongs_to_no_sequence(
    parts: list[Part], more_chunks: int, more_tokens: int, more_rows: int
) -> None:
    state = make_state()
    step, _ = send(parts)
    num_chunks = len(parts) + more_chunks
    own_tokens, own_rows = sum(part.length for part in parts), sum(part.num_rows for part in parts)
    num_tokens, num_rows = own_tokens + more_tokens, own_rows + more_rows
    begin_step(step, state, num_chunks, BLOCK_SIZE, num_tokens, num_rows)
    spare = slice(own_tokens, num_tokens)
    assert state.slot_mapping[spare].tolist() == [-1] * more_tokens
    assert state.token_ids[spare].tolist() == [0] * more_tokens
    assert state.positions[spare].tolist() == [0] * more_tokens
    spare = slice(own_rows, num_rows)
    assert state.sample_rows[spare].tolist() == list(range(own_rows, num_rows))
    assert state.sample_positions[spare].tolist() == [0] * more_rows
    assert state.tail_starts[spare].tolist() == [0] * more_rows
    assert state.tail_lengths[spare].tolist() == [0] * more_rows
    assert state.seq_lens[len(parts) : num_chunks].tolist() == [0] * more_chunks
    row_params = state.step_row_params[spare].cpu().numpy().view(ROW_PARAMS).reshape(-1)
    assert (row_params["temperature"] == 0).all()
    assert (row_params["slot"] == -1).all()
    for of_tokens in (state.token_ids, state.positions, state.slot_mapping):
        assert (of_tokens[:own_tokens] >= 0).all()
        assert (of_tokens[num_tokens:] == POISON).all()
    for of_rows in (state.sample_rows, state.sample_positions, state.tail_starts):
        assert (of_rows[:own_rows] >= 0).all()
        assert (of_rows[num_rows:] == POISON).all()
    assert (state.seq_lens[: len(parts)] > 0).all()
    assert (state.seq_lens[num_chunks:] == POISON).all()


@pytest.mark.parametrize("num_tables", [1, 2, 3, 4])
def test_each_table_has_its_blocks_and_slots(num_tables: int) -> None:
    parts = [Part(7, None, 1), Part(11, 37, 40), Part(0, 16, 3, False)]
    state = make_state(num_tables=num_tables)
    step, _ = send(parts)
    begin_step(step, state, len(parts), BLOCK_SIZE, 48, 3)
    positions = state.positions[:44].cpu()
    of_tokens = torch.tensor([7] * 1 + [11] * 40 + [0] * 3)
    for table in state.by_table:
        tables = table.tables.cpu()
        blocks = tables[of_tokens, positions // BLOCK_SIZE].long()
        slots = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
        assert table.slot_mapping[:49].tolist() == [*slots.tolist(), *[-1] * 4, POISON]
        for chunk, part in enumerate(parts):
            used = -(-int(state.seq_lens[chunk]) // BLOCK_SIZE)
            own = table.step_tables[chunk].tolist()
            assert own == [*tables[part.slot, :used].tolist(), *[POISON] * (WIDTH - used)]


@pytest.mark.parametrize("missing", [NO_DRAFT, NOT_DRAFTED])
@pytest.mark.parametrize("more", [0, 2])
@pytest.mark.parametrize("found", range(6))
def test_missing_drafts_of_a_chunk_alone_are_padding(found: int, more: int, missing: int) -> None:
    """The step then is that of the drafts that there are."""
    states, steps = [], []
    for scheduled in (5, found):
        state = make_state()
        state.drafts[6] = torch.tensor([11, 12, 13, 14, 15])
        if scheduled > found:
            state.drafts[6, found:] = missing
        step, _ = send([Part(6, None, 1 + scheduled, True, scheduled)])
        num_tokens = 6 + more
        begin_step(step, state, 1, BLOCK_SIZE, num_tokens, num_tokens)
        states.append(state)
        steps.append(step)
    (trimmed, expected), (step, own) = states, steps
    for name in ("header", "num_tokens"):
        assert torch.equal(getattr(step, name), getattr(own, name))
    assert step.query_start[:2].tolist() == step.row_start[:2].tolist() == [0, 1 + found]
    for name in (
        *("token_ids", "positions", "slot_mapping", "seq_lens", "step_tables", "sample_rows"),
        *("step_row_params", "sample_positions", "tail_lengths", "count_slots"),
    ):
        assert torch.equal(getattr(trimmed, name), getattr(expected, name)), name
    assert trimmed.count_slots[1 + found : 6 + more].tolist() == [-1] * (5 - found + more)


@pytest.mark.parametrize("right", range(3))
def test_a_missing_draft_is_not_accepted_as_token_0(right: int) -> None:
    state = make_state()
    state.drafts[6] = torch.tensor([11, 12, NO_DRAFT, NO_DRAFT, NO_DRAFT])
    step, _ = send([Part(6, None, 6, True, 5)])
    begin_step(step, state, 1, BLOCK_SIZE, 6, 6)
    state.chosen[:6] = torch.tensor([11, 12, 0, 0, 0, 0])
    if right < 2:
        state.chosen[right] = 99
    state.statuses.zero_()
    end_step(step, state, 1)
    torch.cuda.synchronize()
    assert state.results[2, 3, 0] == right + 1
    assert state.results[2, 4, 0] == 2
    assert state.last_tokens[6] == (0 if right == 2 else 99)


def test_drafts_that_the_host_knows_are_never_padding() -> None:
    state = make_state()
    state.drafts[6] = NO_DRAFT
    step, _ = send([Part(6, 40, 6)])  # all tokens are given
    first, _ = LAYOUT.offsets["row_start"]
    step.buffer[first + 1] = step.header[3] = 6
    begin_step(step, state, 1, BLOCK_SIZE, 8, 8)
    assert step.header.tolist() == [1, 2, 6, 6]
    assert (state.slot_mapping[:6] >= 0).all()
    assert state.slot_mapping[6:8].tolist() == [-1, -1]


@pytest.mark.parametrize("history", [HISTORY, 0])
def test_sampled_tokens_are_kept_and_reported(history: int) -> None:
    state = make_state(history)
    parts = [Part(4, 10, 1), Part(9, 20, 1, False), Part(2, 30, 1)]
    step, _ = send(parts)
    begin_step(step, state, 3, BLOCK_SIZE)
    before = state.last_tokens.tolist()
    state.chosen.copy_(torch.arange(100, 124))
    state.logprobs.copy_(-torch.arange(24) / 7)
    state.statuses[:3] = torch.tensor([0, 1, 2])
    state.results.fill_(POISON)
    end_step(step, state, 5)
    torch.cuda.synchronize()
    before[4], before[2] = 100, 102
    assert state.last_tokens.tolist() == before
    assert state.last_positions[[4, 2]].tolist() == [11, 31]
    results = state.results.numpy()
    assert (results[:2] == POISON).all()
    assert results[2, 0].tolist() == [100, POISON, 102] + [POISON] * 21
    assert results[2, 1].view(np.float32)[[0, 2]].tolist() == pytest.approx([0, -2 / 7])
    assert results[2, 2, [0, 2]].tolist() == [0, 2]
    assert results[2, 3, :3].tolist() == [1, 0, 1]
    row_params = state.row_params[:, SLOT].tolist()
    assert state.count_slots[:3].tolist() == [row_params[4], -1, row_params[2]]
    if history:
        assert state.history is not None
        assert (state.history[4, 11], state.history[2, 31]) == (100, 102)
        assert int((state.history != 0).sum()) == 2


def test_of_a_prompt_only_the_token_after_its_last_one_counts() -> None:
    """The tokens inside are given: they are not output, whatever the sampler chose."""
    state = make_state()
    parts = [Part(4, 0, 5, False, 0, 5), Part(9, 20, 6, True, 0, 5), Part(2, 30, 1)]
    step, _ = send(parts)
    begin_step(step, state, 3, BLOCK_SIZE)
    before = state.last_tokens.tolist()
    state.chosen.copy_(torch.arange(100, 124))
    state.statuses.zero_()
    state.results.fill_(POISON)
    end_step(step, state, 3)
    torch.cuda.synchronize()
    before[9], before[2] = 110, 111
    assert state.last_tokens.tolist() == before
    assert state.last_positions[[9, 2]].tolist() == [26, 31]
    assert state.results[2, 3, :3].tolist() == [0, 1, 1]
    assert state.results[2, 0, :12].tolist() == [POISON] * 10 + [110, 111]
    row_params = state.row_params[:, SLOT].tolist()
    assert state.count_slots[:12].tolist() == [-1] * 10 + [row_params[9], row_params[2]]
    assert state.history is not None
    assert (state.history[9, 26], state.history[2, 31]) == (110, 111)
    assert int((state.history != 0).sum()) == 2


@pytest.mark.parametrize("right", range(6))
def test_drafts_count_as_far_as_the_model_chose_the_same(right: int) -> None:
    state = make_state()
    state.drafts[6] = torch.tensor([11, 12, 13, 14, 15])
    step, _ = send([Part(3, None, 1), Part(6, None, 6, True, 5)])
    start = int(state.last_positions[6])
    begin_step(step, state, 2, BLOCK_SIZE)
    state.chosen[1:7] = torch.tensor([11, 12, 13, 14, 15, 16])
    if right < 5:
        state.chosen[1 + right] = 99
    state.statuses.zero_()
    end_step(step, state, 2)
    torch.cuda.synchronize()
    results = state.results[2]
    assert results[3, :2].tolist() == [1, right + 1]
    assert results[4, 1] == 5
    last = 16 if right == 5 else 99
    assert results[0, 1 : 2 + right].tolist() == [*range(11, 11 + right), last]
    assert state.last_tokens[6] == last
    assert state.last_positions[6] == start + right + 1
    assert state.drafts[6].tolist() == [NOT_DRAFTED] * NUM_DRAFTS, "they are used up"
    assert state.history is not None
    recorded = state.history[6, start + 1 : start + 2 + right].tolist()
    assert recorded == [*range(11, 11 + right), last]
    row_params = int(state.row_params[6, SLOT])
    assert state.count_slots[1:7].tolist() == [row_params] * (right + 1) + [-1] * (5 - right)


@pytest.mark.parametrize(
    ("drafts", "num_proposed"),
    [
        ([11, 12, 13, 14, 15], 5),
        ([11, 12, NO_DRAFT, NO_DRAFT, NO_DRAFT], 2),
        ([NO_DRAFT] * 5, 0),
        ([NOT_DRAFTED] * 5, NOT_DRAFTED),
    ],
)
@pytest.mark.parametrize("scheduled", [0, 3])
def test_the_number_of_proposed_drafts_is_reported(
    drafts: list[int], num_proposed: int, scheduled: int
) -> None:
    """Whether or not the step verifies them."""
    state = make_state()
    state.drafts[6] = torch.tensor(drafts)
    step, _ = send([Part(6, None, 1 + scheduled, True, scheduled)])
    begin_step(step, state, 1, BLOCK_SIZE)
    state.statuses.zero_()
    end_step(step, state, 1)
    torch.cuda.synchronize()
    assert state.results[2, 4, 0] == num_proposed


@pytest.mark.parametrize(
    ("chosen", "would_accept"),
    [
        ([11], True),
        ([12], False),
        ([11, 12, 13], True),
        ([11, 12, 99], False),
        ([11, 99, 13], False),  # that draft had a row, and was rejected
        ([11, 12, 13, 14, 15, 16], False),  # all drafts had
    ],
)
def test_a_step_reports_whether_its_next_draft_was_right(
    chosen: list[int], would_accept: bool
) -> None:
    state = make_state()
    state.drafts[6] = torch.tensor([11, 12, 13, 14, 15])
    count = len(chosen)
    step, _ = send([Part(6, None, count, True, count - 1)])
    begin_step(step, state, 1, BLOCK_SIZE)
    state.statuses.zero_()
    state.chosen[:count] = torch.tensor(chosen)
    end_step(step, state, 1)
    torch.cuda.synchronize()
    assert bool(state.results[2, 5, 0]) == would_accept


def test_no_row_after_a_failed_one_is_accepted() -> None:
    state = make_state()
    state.drafts[6] = torch.tensor([11, 12, 13, 14, 15])
    step, _ = send([Part(6, None, 6, True, 5)])
    begin_step(step, state, 1, BLOCK_SIZE)
    state.chosen[:6] = torch.tensor([11, 12, 13, 14, 15, 16])
    state.statuses[:6] = torch.tensor([0, 0, 1, 0, 0, 0])
    end_step(step, state, 1)
    torch.cuda.synchronize()
    assert state.results[2, 3, 0] == 3
    assert state.results[2, 2, :3].tolist() == [0, 0, 1]


@pytest.mark.parametrize("count", [0, 1, 300])
def test_diffs_reach_their_places(count: int) -> None:
    state = make_state()
    places = torch.randperm(SLOTS * WIDTH, device="cuda")[:count].int()
    blocks = torch.arange(count, device="cuda").int()
    expected = state.tables.clone()
    expected.view(-1)[places.long()] = blocks
    write_tables(places, blocks, state.tables)
    assert torch.equal(state.tables, expected)

    slots = torch.randperm(SLOTS, device="cuda")[: min(count, 5)].int()
    news = torch.randint(-(2**31), 2**31 - 1, (len(slots), WORDS), device="cuda").int()
    wanted = state.row_params.clone()
    wanted[slots.long()] = news
    write_row_params(slots, news, state.row_params)
    assert torch.equal(state.row_params, wanted)


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("count", [1, 255, 2304, 300_000])
def test_a_step_is_uploaded_from_host_memory(count: int, pdl: bool) -> None:
    """Also where the host has written it anew since the last upload from the same place."""
    source = torch.empty(count + 1, dtype=torch.int32).pin_memory()[1:]
    step = torch.full((count + 1,), POISON, dtype=torch.int32, device="cuda")
    for turn in range(50):
        source.copy_(torch.arange(count) * (turn + 1))
        upload(source, step[:count], pdl=pdl)
        assert torch.equal(step[:count].cpu(), source)
        assert step[count] == POISON


def test_only_host_memory_is_uploaded() -> None:
    step = torch.zeros(4, dtype=torch.int32, device="cuda")
    for source in (step.clone(), torch.zeros(4), torch.zeros(8, dtype=torch.int32)[::2]):
        with pytest.raises(ValueError, match="source must be int32"):
            upload(source, step)
