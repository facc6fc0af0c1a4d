"""Rows of the embedding table, exactly."""

from __future__ import annotations

import pytest
import torch

from guarded import Guarded
from inflight_kernels.ops.embedding import embedding
from inflight_kernels.torch_ops import transformer

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("id_type", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("hidden", [8, 576, 4096])
@pytest.mark.parametrize("tokens", [1, 5, 1000])
def test_rows_are_those_of_the_reference(
    dtype: torch.dtype, id_type: torch.dtype, hidden: int, tokens: int
) -> None:
    table = torch.randn(999, hidden, device="cuda").to(dtype)
    ids = torch.randint(0, 999, (tokens,), device="cuda").to(id_type)
    ids[0] = 998
    out = Guarded(tokens, hidden, dtype=dtype)
    embedding(ids, table, out=out.tensor)
    assert torch.equal(out.check(), transformer.embedding(ids, table))


def test_parts_of_a_vocabulary_add_up_to_the_whole() -> None:
    table = torch.randn(100, 64, device="cuda")
    ids = torch.tensor([0, 49, 50, 99, 7], device="cuda")
    parts = [Guarded(5, 64, dtype=torch.float32) for _ in range(2)]
    embedding(ids, table[:50], out=parts[0].tensor)
    embedding(ids, table[50:], out=parts[1].tensor, first=50)
    assert torch.equal(parts[0].check() + parts[1].check(), table[ids])


def test_an_id_outside_the_table_reads_nothing() -> None:
    table = torch.ones(10, 64, device="cuda")
    ids = torch.tensor([-1, 10, 2**40, 3], device="cuda")
    out = Guarded(4, 64, dtype=torch.float32)
    embedding(ids, table, out=out.tensor)
    assert out.check().sum(-1).tolist() == [0, 0, 0, 64]


def test_ids_may_start_anywhere() -> None:
    table = torch.randn(100, 64, device="cuda")
    ids = torch.arange(50, device="cuda", dtype=torch.int32)
    out = torch.empty(49, 64, device="cuda")
    embedding(ids[1:], table, out=out)
    assert torch.equal(out, table[1:50])
