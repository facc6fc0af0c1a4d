"""On a GPU, blocks that no sliding window reaches are freed, and texts stay the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inflight.engine.engine import generate
from windowed import LENGTHS, MODELS, keep_all, make_engine, requests, run_poisoned, write_model

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize(
    "changes", [{}, {"cuda_graphs": False}, {"enable_prefix_caching": True}], ids=str
)
def test_texts_are_the_same_and_freed_blocks_are_never_read(
    tmp_path: Path,
    name: str,
    head_dim: int,
    changes: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = {"hidden_size": 4 * head_dim, "intermediate_size": 512, "head_dim": head_dim}
    checkpoint = write_model(tmp_path, name, **shape)
    # So that a text does not depend on the steps' other sequences, whose number differs.
    changes = changes | {"batch_invariant": True}
    texts, num_freed = run_poisoned(make_engine(checkpoint, "gpu", **changes))
    assert num_freed > 0
    keep_all(monkeypatch)
    assert texts == generate(make_engine(checkpoint, "gpu", **changes), requests(LENGTHS))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_attention_that_rotates_its_own_keys_reads_no_freed_block(
    tmp_path: Path, head_dim: int
) -> None:
    """Decode steps that are not batch-invariant: NaN would end a request with an error."""
    shape = {"hidden_size": 4 * head_dim, "intermediate_size": 512, "head_dim": head_dim}
    checkpoint = write_model(tmp_path, "5 of 6 layers", **shape)
    _, num_freed = run_poisoned(make_engine(checkpoint, "gpu"))
    assert num_freed > 0
