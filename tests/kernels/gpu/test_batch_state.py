"""A step spread out on the device is the step that the host meant."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inflight_kernels.batch_state import (
    FROM_DEVICE,
    BatchState,
    Step,
    StepLayout,
    begin_step,
    end_step,
    write_tables,
    write_wishes,
)
from inflight_kernels.sampling import WISH

pytestmark = pytest.mark.gpu

BLOCK_SIZE = 16
WIDTH = 40
SLOTS = 12
LAYOUT = StepLayout(max_chunks=8, max_tokens=2048)
WORDS = WISH.itemsize // 4
POISON = -77


def make_state() -> BatchState:
    state = BatchState(LAYOUT, SLOTS, WIDTH, 3, "cuda")
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(tensor: torch.Tensor, high: int) -> None:
        tensor.copy_(torch.randint(0, high, tensor.shape, generator=generator, device="cuda"))

    draw(state.tables, 10**6)
    draw(state.last_tokens, 128_000)
    draw(state.wishes, 10**9)
    for written in (state.token_ids, state.positions, state.slot_mapping, state.last_rows):
        written.fill_(POISON)
    for written in (state.step_tables, state.step_wishes, state.sample_positions):
        written.fill_(POISON)
    state.count_slots.fill_(POISON)
    return state


def send(
    slots: list[int], starts: list[int], lengths: list[int], samples: list[bool], known: list[bool]
) -> tuple[Step, np.ndarray]:
    """A step on the device, and its tokens."""
    random = np.random.default_rng(len(slots))
    tokens = random.integers(0, 128_000, sum(lengths)).astype(np.int32)
    query_start = np.cumsum([0, *lengths])
    for first, is_known in zip(query_start, known, strict=False):
        if not is_known:
            tokens[first] = FROM_DEVICE
    host = np.zeros(LAYOUT.size, np.int32)
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    spare = LAYOUT.max_chunks - len(slots)
    arrays = {
        "header": [len(slots), 2],
        "slots": slots,
        "sample_slots": [s if chosen else -1 for s, chosen in zip(slots, samples, strict=True)],
        "seq_lens": ends,
        "query_start": [*query_start, *[query_start[-1]] * spare],
        "tokens": tokens,
    }
    for name, values in arrays.items():
        first, _ = LAYOUT.offsets[name]
        host[first : first + len(values)] = values
    step = Step(LAYOUT, "cuda")
    step.buffer.copy_(torch.from_numpy(host))
    return step, tokens


@pytest.mark.parametrize(
    ("starts", "lengths"),
    [([0, 37, 15, 600], [1, 1, 1, 1]), ([0, 0, 16, 5], [1, 33, 600, 250]), ([600], [40])],
)
def test_tokens_positions_and_slots(starts: list[int], lengths: list[int]) -> None:
    state = make_state()
    count = len(starts)
    slots = [7, 0, 11, 3][:count]
    samples = [True, False, True, True][:count]
    known = [False, True, True, False][:count]
    step, tokens = send(slots, starts, lengths, samples, known)
    begin_step(step, state, count, BLOCK_SIZE)
    tables, last = state.tables.cpu().numpy(), state.last_tokens.cpu().numpy()
    wishes = state.wishes.cpu().numpy()
    row = 0
    for chunk, (slot, start, length) in enumerate(zip(slots, starts, lengths, strict=True)):
        positions = np.arange(start, start + length)
        expected = tokens[row : row + length].astype(np.int64)
        expected[expected == FROM_DEVICE] = last[slot]
        rows = slice(row, row + length)
        assert state.token_ids[rows].cpu().numpy().tolist() == expected.tolist()
        assert state.positions[rows].tolist() == positions.tolist()
        blocks = tables[slot, positions // BLOCK_SIZE].astype(np.int64)
        assert (
            state.slot_mapping[rows].tolist()
            == (blocks * BLOCK_SIZE + positions % BLOCK_SIZE).tolist()
        )
        row += length
        used = -(-(start + length) // BLOCK_SIZE)
        table = state.step_tables[chunk].cpu().numpy()
        assert table[:used].tolist() == tables[slot, :used].tolist()
        assert (table[used:] == POISON).all()
        assert state.last_rows[chunk] == row - 1
        assert state.sample_positions[chunk] == start + length
        assert state.step_wishes[chunk].tolist() == wishes[slot].tolist()
        assert state.count_slots[chunk] == (wishes[slot, -1] if samples[chunk] else -1)
    assert (state.token_ids[row:] == POISON).all()
    assert (state.step_wishes[count:] == POISON).all()


def test_rows_that_fill_up_a_graph_are_nobodys() -> None:
    state = make_state()
    step, _ = send([4, 9], [10, 20], [1, 1], [True, True], [True, False])
    begin_step(step, state, 5, BLOCK_SIZE)
    assert state.slot_mapping[2:5].tolist() == [-1] * 3
    assert state.token_ids[2:5].tolist() == [0] * 3
    assert state.positions[2:5].tolist() == [0] * 3
    assert state.count_slots[2:5].tolist() == [-1] * 3
    wishes = state.step_wishes[2:5].cpu().numpy().view(WISH).reshape(-1)
    assert (wishes["temperature"] == 0).all()
    assert (wishes["slot"] == -1).all()
    assert (state.token_ids[5:] == POISON).all()


def test_what_was_chosen_is_kept_and_told() -> None:
    state = make_state()
    step, _ = send([4, 9, 2], [10, 20, 30], [1, 1, 1], [True, False, True], [True] * 3)
    before = state.last_tokens.tolist()
    state.chosen.copy_(torch.arange(100, 108))
    state.logprobs.copy_(-torch.arange(8) / 7)
    state.statuses.copy_(torch.arange(8))
    state.results.fill_(POISON)
    end_step(step, state, 5)
    torch.cuda.synchronize()
    expected = list(before)
    expected[4], expected[2] = 100, 102
    assert state.last_tokens.tolist() == expected
    results = state.results.numpy()
    assert (results[:2] == POISON).all()
    assert results[2, 0].tolist() == [100, POISON, 102] + [POISON] * 5
    assert results[2, 1].view(np.float32)[[0, 2]].tolist() == pytest.approx([0, -2 / 7])
    assert results[2, 2, [0, 2]].tolist() == [0, 2]


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
    wanted = state.wishes.clone()
    wanted[slots.long()] = news
    write_wishes(slots, news, state.wishes)
    assert torch.equal(state.wishes, wanted)
