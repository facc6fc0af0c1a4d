"""Chunks are converted to equivalent flat arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.core.batch import Batch, Chunk
from inflight.core.request import Request
from inflight.core.sequence import Sequence
from inflight.sampling.params import SamplingParams
from tiny import chunk


def sequence(token_ids: list[int], blocks: list[int]) -> Sequence:
    one = Sequence(Request(1, token_ids, SamplingParams()), max_tokens=1)
    one.tables = [blocks]
    return one


def test_a_prompt_and_a_decode_step_side_by_side() -> None:
    prompt = sequence([10, 11, 12, 13, 14], blocks=[3, 1, 7])
    decode = sequence([20, 21, 22], blocks=[5, 2])
    arrays = Batch([chunk(prompt, 1, 3), chunk(decode, 2, 1)]).arrays(block_size=2)
    assert arrays.token_ids.tolist() == [11, 12, 13, 22]
    assert arrays.positions.tolist() == [1, 2, 3, 2]
    assert arrays.tables[0].slot_mapping.tolist() == [7, 2, 3, 4]
    assert arrays.query_start.tolist() == [0, 3, 4]
    assert arrays.seq_lens.tolist() == [4, 3]
    assert arrays.tables[0].block_tables.tolist() == [[3, 1, 7], [5, 2, 0]]
    assert arrays.sample_rows.tolist() == [3], "the prompt is not read to its end"


def test_rows_of_scores_come_before_the_last_one() -> None:
    one = sequence([10, 11, 12, 13, 14], blocks=[0])
    inner, last = Chunk(one, 0, 3, False, num_scores=2), Chunk(one, 3, 2, True, num_scores=1)
    arrays = Batch([inner, last]).arrays(block_size=8)
    assert arrays.sample_rows.tolist() == [1, 2, 3, 4]
    assert inner.scored_ids == [12, 13]
    assert last.scored_ids == [14]
    assert Chunk(one, 4, 1, True).scored_ids == []


def test_a_batch_without_chunks_has_empty_arrays() -> None:
    arrays = Batch([]).arrays(block_size=4)
    assert arrays.query_start.tolist() == [0]
    assert arrays.tables[0].block_tables.shape == (0, 0)
    assert len(arrays.token_ids) == len(arrays.sample_rows) == len(arrays.seq_lens) == 0


def test_arrays_of_a_token_that_the_host_does_not_know_are_refused() -> None:
    one = sequence([1, 2, 3], blocks=[0])
    with pytest.raises(ValueError):
        Batch([chunk(one, 3, 1)]).arrays(block_size=4)


def test_num_tokens_is_the_sum_of_the_chunks() -> None:
    one = sequence([1, 2, 3], blocks=[0])
    assert Batch([chunk(one, 0, 2), chunk(one, 2, 1)]).num_tokens == 3
    assert Batch([]).num_tokens == 0


@settings(max_examples=60, deadline=None)
@given(data=st.data(), block_size=st.sampled_from([1, 2, 4, 16]))
def test_the_arrays_agree_with_the_chunks(data: st.DataObject, block_size: int) -> None:
    chunks = []
    ids = data.draw(st.permutations(range(64)))
    for _ in range(data.draw(st.integers(0, 5))):
        token_ids = data.draw(st.lists(st.integers(0, 50_000), min_size=1, max_size=10))
        blocks = [ids.pop() for _ in range(-(-len(token_ids) // block_size))]
        start = data.draw(st.integers(0, len(token_ids) - 1))
        length = data.draw(st.integers(1, len(token_ids) - start))
        chunks.append(chunk(sequence(token_ids, blocks), start, length))
    arrays = Batch(chunks).arrays(block_size)
    row = 0
    sampled = []
    for index, one in enumerate(chunks):
        assert arrays.query_start[index] == row
        assert arrays.seq_lens[index] == one.end
        for position in range(one.start, one.end):
            assert arrays.token_ids[row] == one.sequence.token_ids[position]
            assert arrays.positions[row] == position
            block, offset = divmod(int(arrays.tables[0].slot_mapping[row]), block_size)
            assert block == one.sequence.tables[0][position // block_size]
            assert block == arrays.tables[0].block_tables[index, position // block_size]
            assert offset == position % block_size
            row += 1
        if one.samples:
            sampled.append(row - 1)
    assert arrays.query_start[-1] == row == Batch(chunks).num_tokens
    assert arrays.sample_rows.tolist() == sampled
    assert all(
        array.dtype == np.int64
        for array in (
            arrays.token_ids,
            arrays.positions,
            arrays.tables[0].slot_mapping,
            arrays.sample_rows,
        )
    )
