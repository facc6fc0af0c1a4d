"""A request that can never be served is rejected before any state is kept."""

from __future__ import annotations

import pytest

from inflight.core.request import Request
from inflight.engine.admission import Admission, PoolLimits
from inflight.errors import RequestError
from inflight.kv.layout import KVTables
from inflight.sampling.params import SamplingParams
from scheduling import beam_search, prompt, sequence


def test_a_request_beyond_the_pool_is_refused_with_what_fits() -> None:
    limits = PoolLimits(4, KVTables.single(4), max_num_seqs=4)
    with pytest.raises(RequestError, match=r"prompt of 10 tokens and max_tokens of 7 .* at most 6"):
        limits.check(sequence(1, prompt(10), max_tokens=7))
    with pytest.raises(RequestError, match="a prompt of at most 15 fits"):
        limits.check(sequence(1, prompt(16), max_tokens=1))
    limits.check(sequence(1, prompt(10), max_tokens=6))


@pytest.mark.parametrize(
    ("num_blocks", "max_num_seqs", "max_tokens", "message"),
    [
        (16, 2, 4, "beam_width: 3 beams run as 3 sequences; allowed: up to max_num_seqs, 2"),
        (
            9,
            4,
            13,
            "beam_width: 3 beams, a prompt of 8 tokens and max_tokens of 13 "
            "need 11 blocks of KV cache, and the whole cache has 9; allowed: max_tokens of at "
            "most 9, or fewer beams",
        ),
    ],
)
def test_a_search_that_could_not_run_alone_is_refused(
    num_blocks: int, max_num_seqs: int, max_tokens: int, message: str
) -> None:
    limits = PoolLimits(num_blocks, KVTables.single(4), max_num_seqs)
    group = beam_search(1, [0] * 8, max_tokens, beam_width=3)
    with pytest.raises(RequestError, match=message):
        limits.check(group.members[0])


def test_the_largest_search_that_fits_is_accepted() -> None:
    group = beam_search(1, [0] * 8, 13, beam_width=3)
    PoolLimits(11, KVTables.single(4), max_num_seqs=3).check(group.members[0])


@pytest.mark.parametrize(
    ("max_tokens", "min_tokens", "expected"),
    [
        (None, 0, 16),
        (None, 20, 20),
        (5, 0, 5),
        (99, 0, 54),
        (None, 54, 54),
        (-1, 0, 54),
        (-1, 54, 54),
    ],
)
def test_the_length_is_the_requests_or_the_default_within_the_context(
    max_tokens: int | None, min_tokens: int, expected: int
) -> None:
    admission = Admission(PoolLimits(99, KVTables.single(4), 4), 100, 64, 16, [2])
    params = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens)
    assert admission.sequence(Request(1, [1] * 10, params)).max_tokens == expected


@pytest.mark.parametrize("min_tokens", [55, 2**31 - 1])
def test_a_minimum_beyond_the_context_is_refused(min_tokens: int) -> None:
    admission = Admission(PoolLimits(99, KVTables.single(4), 4), 100, 64, 16, [2])
    with pytest.raises(RequestError, match=r"min_tokens: .* allowed: up to 54"):
        admission.sequence(Request(1, [1] * 10, SamplingParams(min_tokens=min_tokens)))


def test_a_prompt_without_tokens_is_refused() -> None:
    admission = Admission(PoolLimits(99, KVTables.single(4), 4), 100, 64, 16, [2])
    with pytest.raises(RequestError, match="input_ids: the prompt has no tokens"):
        admission.sequence(Request(1, [], SamplingParams()))


def test_the_whole_context_is_limited_to_a_small_pool() -> None:
    admission = Admission(PoolLimits(4, KVTables.single(8), 4), 100, 64, 16, [2])
    made = admission.sequence(Request(1, [1] * 10, SamplingParams(max_tokens=-1)))
    assert made.max_tokens == 4 * 8 - 10
    with pytest.raises(RequestError, match="whole cache has 32"):
        admission.sequence(Request(1, [1] * 10, SamplingParams(max_tokens=54)))


@pytest.mark.parametrize("token_id", [-1, -(2**40), 100, 2**32 - 1, 2**32, 2**70])
def test_an_id_beyond_the_vocabulary_is_refused_by_name(token_id: int) -> None:
    """Also one that no array of 32 bits holds."""
    admission = Admission(PoolLimits(99, KVTables.single(4), 4), 100, 64, 16, [2])
    admission.sequence(Request(1, [0, 99, 5], SamplingParams()))
    with pytest.raises(RequestError, match=rf"token id {token_id} is not in the .*: 0 to 99"):
        admission.sequence(Request(2, [0, 99, token_id, 5], SamplingParams()))


def test_stop_tokens_end_a_request_beside_the_model_s_own() -> None:
    admission = Admission(PoolLimits(99, KVTables.single(4), 4), 100, 64, 16, [2])
    params = SamplingParams(end_id=9, stop_token_ids=(7, 8, 7))
    assert admission.sequence(Request(1, [1], params)).eos_token_ids == frozenset({2, 7, 8, 9})
    with pytest.raises(RequestError, match="stop_token_ids: 100 is not in the vocabulary"):
        admission.sequence(Request(1, [1], SamplingParams(stop_token_ids=(5, 100))))


def test_a_request_keeps_its_own_seed_and_end_id() -> None:
    admission = Admission(PoolLimits(99, KVTables.single(4), 4), 100, 64, 16, [2])
    made = admission.sequence(Request(1, [1], SamplingParams(seed=7, end_id=9)))
    assert (made.seed, made.eos_token_ids) == (7, frozenset({2, 9}))
