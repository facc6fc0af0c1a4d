"""A captured size is used by all steps that fit it, and is only slightly larger."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from inflight.core.step_size import StepSize
from inflight.execution.graphs.buckets import capture_sizes, row_counts, sharing_counts

MAX_NUM_SEQS, MAX_DRAFTS = 64, 5
MAX_ROWS = MAX_NUM_SEQS + 100
SMALL_LAYER, LAYER_OF_8B = 10**6, 218_103_808
SIZES = capture_sizes(MAX_NUM_SEQS, MAX_ROWS, MAX_DRAFTS, 8192, SMALL_LAYER)


def bucket_for(step: StepSize) -> StepSize | None:
    return next((size for size in SIZES if size.fits(step)), None)


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 9, 24, 100, 256, 300, 1024])
def test_each_decode_step_has_a_size_that_is_little_larger(most: int) -> None:
    counts = row_counts(most)
    assert counts == sorted(set(counts))
    assert counts[-1] == most
    for rows in range(1, most + 1):
        count = next(count for count in counts if count >= rows)
        assert count - rows < (8 if count <= 256 else 64)


def test_steps_of_a_token_each_are_recorded_as_such() -> None:
    for count in range(1, MAX_NUM_SEQS + 1):
        bucket = bucket_for(StepSize(count, count, count, 1))
        assert bucket is not None
        assert bucket.max_q_len == 1


@given(st.integers(1, MAX_NUM_SEQS), st.integers(1, MAX_DRAFTS), st.data())
def test_steps_that_verify_drafts_are_recorded_as_such(
    num_chunks: int, longest: int, data: st.DataObject
) -> None:
    rest = data.draw(st.integers(0, MAX_ROWS - num_chunks))
    num_tokens = num_chunks + min(rest, num_chunks * longest)
    bucket = bucket_for(StepSize(num_tokens, num_chunks, num_tokens, min(num_tokens, 1 + longest)))
    assert bucket is not None
    assert bucket.num_rows == bucket.num_tokens
    if num_chunks > 1:
        assert bucket.max_q_len == min(bucket.num_tokens, 1 + MAX_DRAFTS)


@pytest.mark.parametrize(
    ("num_drafts", "num_tokens"), [(1, 2), (2, 4), (3, 4), (4, 6), (MAX_DRAFTS, 6)]
)
def test_drafts_of_one_sequence_have_sizes_of_one_chunk(num_drafts: int, num_tokens: int) -> None:
    """Attention of a chunk of few tokens is faster than that of any chunks of as many."""
    length = 1 + num_drafts
    bucket = bucket_for(StepSize(length, 1, length, length))
    assert bucket == StepSize(num_tokens, 1, num_tokens, num_tokens)


def test_no_chunk_is_recorded_that_is_longer_than_a_step() -> None:
    for size in capture_sizes(1, 3, 8, 3, SMALL_LAYER):
        assert size.max_q_len <= size.num_tokens <= 3


@given(st.integers(1, 2048))
def test_a_prompt_alone_has_a_size_for_itself(length: int) -> None:
    bucket = bucket_for(StepSize(length, 1, 1, length))
    assert bucket is not None
    assert bucket.num_tokens - length < (128 if length > 512 else 64 if length > 256 else 32)
    if length > 1:
        assert bucket.num_chunks == bucket.num_rows == 1


@given(st.integers(0, MAX_NUM_SEQS - 1), st.integers(20, 2048))
def test_a_prompt_among_others_finds_room(others: int, length: int) -> None:
    step = StepSize(others + length, others + 1, others + 1, length)
    assert (bucket_for(step) is not None) == (others + length <= 2048)


@given(st.integers(1, 2048), st.integers(0, 40_000))
def test_a_size_without_room_for_the_keys_of_prompts_is_not_taken(length: int, keys: int) -> None:
    sizes = capture_sizes(MAX_NUM_SEQS, MAX_ROWS, 0, 8192, SMALL_LAYER, max_prompt_keys=32_768)
    step = StepSize(length, 1, 1, length, keys)
    bucket = next((size for size in sizes if size.fits(step)), None)
    assert (bucket is not None) == (length <= 512 or keys <= 32_768)
    if length > 512 and bucket is not None:
        assert bucket.prompt_keys == 32_768, "its prompts are dequantised"
    unknown = StepSize(length, 1, 1, length)
    assert any(size.fits(unknown) for size in sizes) == (length <= 512)


@given(st.integers(1, 600), st.integers(1, MAX_NUM_SEQS), st.integers(1, 160), st.integers(1, 600))
def test_rows_are_taken_for_tokens_only_where_each_has_one(
    num_tokens: int, num_chunks: int, num_rows: int, max_q_len: int
) -> None:
    step = StepSize(num_tokens, num_chunks, num_rows, max_q_len)
    bucket = bucket_for(step)
    if bucket is not None and num_rows < num_tokens:
        assert bucket.num_rows < bucket.num_tokens


def test_larger_requests_find_no_room() -> None:
    assert bucket_for(StepSize(2049, 1, 1, 2049)) is None
    assert bucket_for(StepSize(200, MAX_NUM_SEQS + 1, MAX_NUM_SEQS + 1, 100)) is None
    assert bucket_for(StepSize(200, 1, 200, 200)) is None, "each token has a score"


def test_no_size_is_larger_than_a_step_can_be() -> None:
    for size in capture_sizes(8, 8, 0, 100, SMALL_LAYER):
        assert size.num_tokens <= 100
        assert size.num_chunks <= 8
        assert size.num_rows <= min(8, size.num_tokens)
    for size in capture_sizes(1, 1, 0, 100, SMALL_LAYER):
        assert size.num_chunks == 1


def test_no_graph_is_captured_if_the_gpu_is_slower_than_the_launches() -> None:
    sizes = capture_sizes(8, 8, 0, 8192, 2 * LAYER_OF_8B)
    assert max(size.num_tokens for size in sizes) == 1024


def test_decodes_that_share_prefixes_have_graphs_of_their_own() -> None:
    for count in range(8, MAX_NUM_SEQS + 1):
        step = StepSize(count, count, count, 1, 0, shares_prefixes=True)
        bucket = bucket_for(step)
        assert bucket is not None
        assert bucket.shares_prefixes
        assert bucket_for(replace(step, shares_prefixes=False)) == bucket_for(
            StepSize.decode(count)
        )
    assert not any(size.shares_prefixes for size in SIZES if size.max_q_len > 1)


def test_few_sequences_need_no_graphs_for_shared_prefixes() -> None:
    assert sharing_counts(15) == []
    assert sharing_counts(16) == [16]
    assert sharing_counts(300) == [16, 32, 64, 96, 128, 192, 256, 300]
