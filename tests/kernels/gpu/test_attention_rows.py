"""Tokens of a step as chunks of one token each."""

from __future__ import annotations

import itertools

import pytest
import torch

from inflight_kernels.ops.attention.rows import TokenChunks, find_chunks

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
BLOCKS = 24


def _ints(values: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=CUDA)


@pytest.mark.parametrize("lengths", [[1], [300], [3, 0, 5, 1, 0, 0], [1] * 700, [2, 0] * 300])
@pytest.mark.parametrize("own_blocks", [BLOCKS, BLOCKS + 8, BLOCKS - 8])
def test_a_token_has_the_keys_up_to_its_own_and_the_table_of_its_chunk(
    lengths: list[int], own_blocks: int
) -> None:
    """Chunks may have no token, at the end of a captured step or in between."""
    histories = [7 * chunk % 11 for chunk in range(len(lengths))]
    places = [
        (chunk, histories[chunk] + token)
        for chunk, length in enumerate(lengths)
        for token in range(length)
    ]
    tables = torch.randint(0, 999, (len(lengths), BLOCKS), dtype=torch.int32, device=CUDA)
    tokens = sorted(
        {0, len(places) // 3, len(places) - 2, len(places) - 1} & set(range(len(places)))
    )
    out = TokenChunks.empty(len(tokens), own_blocks, CUDA)
    find_chunks(
        _ints(tokens),
        _ints([position for _, position in places]),
        _ints([0, *itertools.accumulate(lengths)], torch.int32),
        tables,
        out=out,
    )
    assert out.query_start.tolist() == list(range(len(tokens) + 1))
    assert out.seq_lens.tolist() == [places[token][1] + 1 for token in tokens]
    width = min(BLOCKS, own_blocks)
    expected = tables[[places[token][0] for token in tokens], :width]
    assert torch.equal(out.block_tables[:, :width], expected)
    assert (out.block_tables[:, width:] == 0).all()


def test_a_token_that_does_not_exist_has_no_keys() -> None:
    out = TokenChunks.empty(4, BLOCKS, CUDA)
    out.seq_lens.fill_(9)
    tables = torch.ones(1, BLOCKS, dtype=torch.int32, device=CUDA)
    find_chunks(
        _ints([-1, 2, 3, 1 << 40]), _ints([5, 6, 7]), _ints([0, 3], torch.int32), tables, out=out
    )
    assert out.seq_lens.tolist() == [0, 8, 0, 0]
    assert out.block_tables.any(1).tolist() == [False, True, False, False]


def test_operands_that_do_not_fit_are_refused_by_name() -> None:
    out = TokenChunks.empty(2, BLOCKS, CUDA)
    tables = torch.ones(1, BLOCKS, dtype=torch.int32, device=CUDA)
    positions, query_start = _ints([5, 6, 7]), _ints([0, 3], torch.int32)
    with pytest.raises(ValueError, match="tokens is"):
        find_chunks(_ints([0, 1], torch.int32), positions, query_start, tables, out=out)
    with pytest.raises(ValueError, match="query_start is"):
        find_chunks(_ints([0, 1]), positions, query_start[:1], tables, out=out)
    with pytest.raises(ValueError, match=r"out\.seq_lens is"):
        find_chunks(_ints([0]), positions, query_start, tables, out=out)
