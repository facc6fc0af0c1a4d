"""Prompt lookup matches the reference; a draft model's passes process the right tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inflight_kernels.ops.batch_state import NO_DRAFT, BatchState, StateSizes, Step, StepLayout
from inflight_kernels.ops.drafting import (
    DraftLimits,
    DraftPass,
    MatchLimits,
    advance_drafting,
    begin_drafting,
    draft_ngram,
    next_tokens,
)
from inflight_kernels.ops.sampling import NOT_FINITE, OK, ROW_PARAMS
from inflight_kernels.torch_ops.drafting import RESUME_TOKENS, Copy, propose

pytestmark = pytest.mark.gpu

POISON = -77


@pytest.mark.parametrize("vocab_size", [2, 5, 300])
@pytest.mark.parametrize("num_drafts", [1, 5, 16])
@pytest.mark.parametrize(("max_match", "min_match"), [(1, 1), (4, 2), (8, 3), (32, 2)])
@pytest.mark.parametrize("per_match", [0, 1, 2])
def test_drafts_are_those_of_the_definition(
    vocab_size: int, num_drafts: int, max_match: int, min_match: int, per_match: int
) -> None:
    random = np.random.default_rng(vocab_size * num_drafts + max_match)
    lengths = [1, 2, 3, 7, 40, 256, 257, 1000, 1900]
    history = random.integers(0, vocab_size, (len(lengths) + 1, 1900)).astype(np.int32)
    on_device = torch.from_numpy(history).cuda()
    last = torch.tensor([length - 1 for length in lengths] + [0], dtype=torch.int32, device="cuda")
    drafts = torch.full((len(lengths) + 1, num_drafts), POISON, dtype=torch.int32, device="cuda")
    slots = torch.tensor([*reversed(range(len(lengths))), -1], dtype=torch.int32, device="cuda")
    draft_ngram(slots, last, on_device, drafts, MatchLimits(max_match, min_match, per_match))
    for slot, length in enumerate(lengths):
        tokens = history[slot, :length].astype(np.int64)
        expected, _ = propose(tokens, max_match, min_match, num_drafts, per_match=per_match)
        expected += [NO_DRAFT] * (num_drafts - len(expected))
        assert drafts[slot].tolist() == expected, f"{length} tokens"
    assert drafts[-1].tolist() == [POISON] * num_drafts, "rows of no sequence"


@pytest.mark.parametrize("vocab_size", [2, 5, 50])
@pytest.mark.parametrize(("max_match", "min_match"), [(4, 2), (32, 2), (4, 4)])
def test_copies_are_resumed_as_by_the_definition(
    vocab_size: int, max_match: int, min_match: int
) -> None:
    """Texts of passages of a prompt, with edits, that grow by several tokens at a time."""
    random = np.random.default_rng(vocab_size + max_match)
    prompts = random.integers(0, vocab_size, (8, 200))
    width, num_drafts, num_steps = 2000, 7, 60
    texts = [[*prompt] for prompt in prompts]
    copies: list[Copy | None] = [None] * len(texts)
    slots = torch.arange(len(texts), dtype=torch.int32, device="cuda")
    on_device = torch.full((len(texts), 2), -1, dtype=torch.int32, device="cuda")
    num_resumed = 0
    for _ in range(num_steps):
        history = np.zeros((len(texts), width), np.int32)
        for text, row in zip(texts, history, strict=True):
            row[: len(text)] = text
        last = torch.tensor([len(text) - 1 for text in texts], dtype=torch.int32, device="cuda")
        drafts = torch.full((len(texts), num_drafts), POISON, dtype=torch.int32, device="cuda")
        draft_ngram(
            slots,
            last,
            torch.from_numpy(history).cuda(),
            drafts,
            MatchLimits(max_match, min_match),
            copies=on_device,
        )
        for place, text in enumerate(texts):
            tokens, copy = np.array(text), copies[place]
            without, _ = propose(tokens, max_match, min_match, num_drafts)
            found, copies[place] = propose(tokens, max_match, min_match, num_drafts, copy=copy)
            num_resumed += found != without
            assert drafts[place].tolist() == found + [NO_DRAFT] * (num_drafts - len(found))
            text += found[: random.integers(0, num_drafts + 1)]
            if random.random() < 0.7:  # an edit, or a token of the passage
                begin = int(random.integers(0, 200 - RESUME_TOKENS))
                text += [int(one) for one in prompts[place, begin : begin + random.integers(1, 4)]]
            else:
                text.append(vocab_size)
    assert num_resumed > len(texts)


def test_a_sequence_that_outgrows_its_history_gets_no_drafts() -> None:
    history = torch.zeros(1, 8, dtype=torch.int32, device="cuda")
    last = torch.tensor([8], dtype=torch.int32, device="cuda")
    drafts = torch.full((1, 3), POISON, dtype=torch.int32, device="cuda")
    draft_ngram(
        torch.zeros(1, dtype=torch.int32, device="cuda"), last, history, drafts, MatchLimits(4, 1)
    )
    assert drafts.tolist() == [[NO_DRAFT] * 3]


# ---------------------------------------------------------------- drafting with a model

BLOCK_SIZE = 16
WIDTH = 6
SLOTS = 8
NUM_DRAFTS = 5
MAX_POSITIONS = 90
FIRST_SCRATCH = 1000
LAYOUT = StepLayout(max_rows=12, max_tokens=256)
# Of each chunk: slot, whether it chose, first position and length in the step, the last token's
# position, blocks that its sequence has.
CHUNKS = [
    (3, True, 20, 6, 22, 2),
    (1, False, 0, 40, 40, 3),
    (6, True, 0, 16, 16, 1),  # the last token stands where no block is
    (0, True, 30, 1, 31, 2),
    (5, True, 13, 1, 14, 6),
    (2, True, 84, 3, 86, 6),  # no room for all drafts
    (7, True, 89, 1, 90, 6),  # none for any
]


def after_a_step() -> tuple[Step, BatchState]:
    """A step that has ended, of CHUNKS."""
    step = Step(LAYOUT, "cuda")
    state = BatchState(LAYOUT, StateSizes(SLOTS, WIDTH, 3, NUM_DRAFTS, 128), "cuda")
    generator = torch.Generator("cuda").manual_seed(1)

    def draw(tensor: torch.Tensor, high: int) -> None:
        tensor.copy_(torch.randint(0, high, tensor.shape, generator=generator, device="cuda"))

    draw(state.tables, 900)
    draw(state.last_tokens, 1000)
    draw(state.row_params, 1 << 30)
    draw(state.history, 1000)
    draw(state.step_tables, 900)
    lengths = [chunk[3] for chunk in CHUNKS]
    starts = np.cumsum([0, *lengths]).tolist()
    host = {
        "header": [len(CHUNKS), 0, starts[-1], 0],
        "slots": [chunk[0] for chunk in CHUNKS],
        "sample_slots": [chunk[0] if chunk[1] else -1 for chunk in CHUNKS],
        "query_start": starts,
    }
    for name, values in host.items():
        getattr(step, name)[: len(values)].copy_(torch.tensor(values, dtype=torch.int32))
    for (slot, _, first, length, last, blocks), start in zip(CHUNKS, starts, strict=False):
        state.positions[start : start + length] = torch.arange(first, first + length)
        state.last_positions[slot] = last
        state.tables[slot, blocks:] = -1
    return step, state


@pytest.mark.parametrize("behind", [0, 1])
def test_draft_passes_advance_token_by_token(behind: int) -> None:
    step, state = after_a_step()
    rows = DraftPass(12, "cuda")
    for name in ("token_ids", "positions", "slot_mapping", "seq_lens", "row_params", "rows"):
        getattr(rows, name).fill_(POISON)
    before = state.step_tables.clone()
    limits = DraftLimits(BLOCK_SIZE, behind, MAX_POSITIONS, FIRST_SCRATCH)
    begin_drafting(step, state, rows, 10, limits)
    starts = step.query_start.tolist()
    drafted: dict[int, list[int]] = {chunk[0]: [] for chunk in CHUNKS}
    for index in range(NUM_DRAFTS):
        rows.chosen.copy_(torch.arange(12) + 100 * (index + 1))
        rows.statuses.fill_(OK)
        if index == 2:
            rows.statuses[4] = NOT_FINITE
        for chunk in range(10):
            slot, chose, first, _, last, blocks = (
                CHUNKS[chunk] if chunk < len(CHUNKS) else (-1, False, 0, 0, 0, 0)
            )
            position = last - behind + index
            lives = chose and last < MAX_POSITIONS and (index == 0 or position < MAX_POSITIONS)
            lives = lives and not (chunk == 4 and index > 2)
            label = f"chunk {chunk}, pass {index}"
            assert int(rows.slots[chunk]) == (slot if lives else -1), label
            assert int(rows.seq_lens[chunk]) == (position + 1 if lives else 1), label
            if not lives:
                assert int(rows.slot_mapping[chunk]) == -1, label
                assert int(rows.token_ids[chunk]) == 0, label
                assert int(rows.positions[chunk]) == 0, label
                continue
            token = int(state.last_tokens[slot]) if index == 0 else chunk + 100 * index
            assert int(rows.token_ids[chunk]) == token, label
            assert int(rows.positions[chunk]) == position, label
            assert int(rows.sample_positions[chunk]) == last + 1 + index, label
            block = position // BLOCK_SIZE
            if position >= last:  # its own place, or a scratch block for what has none
                entry = int(state.tables[slot, block]) if block < blocks else 1000 + chunk
                if block == (last - 1) // BLOCK_SIZE:
                    entry = int(before[chunk, block])
                assert int(state.step_tables[chunk, block]) == entry, label
                expected = entry * BLOCK_SIZE + position % BLOCK_SIZE
                assert int(rows.slot_mapping[chunk]) == expected, label
            if index == 0:
                assert int(rows.rows[chunk]) == starts[chunk] + last - 1 - first, label
                row_params = state.row_params[slot].cpu().numpy().view(ROW_PARAMS)[0].copy()
                row_params["slot"], row_params["typical_p"] = -1, 1.0
                row_params["top_n_sigma"] = row_params["epsilon_cutoff"] = 0.0
                row_params["xtc_probability"] = 0.0
                assert rows.row_params[chunk].cpu().numpy().tobytes() == row_params.tobytes(), label
            if int(rows.statuses[chunk]) == OK:
                drafted[slot].append(chunk + 100 * (index + 1))
        advance_drafting(state, rows, 10, limits)
    for slot, tokens in drafted.items():
        expected = tokens + [-1] * (NUM_DRAFTS - len(tokens))
        assert state.drafts[slot].tolist() == expected, f"slot {slot}"
    assert len(drafted[3]) == NUM_DRAFTS
    assert len(drafted[5]) == 2
    assert drafted[1] == drafted[7] == []
    for chunk, (_, _, _, _, last, _) in enumerate(CHUNKS):
        known = (last - 1) // BLOCK_SIZE + 1
        assert torch.equal(state.step_tables[chunk, :known], before[chunk, :known])


@pytest.mark.parametrize("num_tokens", [0, 70, 250])
def test_the_token_after_each_of_a_step(num_tokens: int) -> None:
    step, state = after_a_step()
    assert state.history is not None
    token_ids = torch.full_like(state.token_ids, POISON)
    next_tokens(step, state, token_ids, 10, num_tokens)
    end = 0
    for slot, _, first, length, _, _ in CHUNKS:
        expected = state.history[slot, first + 1 : first + length + 1].long()
        assert torch.equal(token_ids[end : end + length], expected)
        end += length
    assert (token_ids[end:num_tokens] == 0).all(), "rows of no sequence"
    assert (token_ids[max(end, num_tokens) :] == POISON).all(), "not asked for"
