"""Blocks that no sliding window reaches are freed; texts stay the same, and more sequences fit."""

from __future__ import annotations

from typing import Any

import pytest

import family_gpu
from inflight.checkpoint.locate import Checkpoint
from inflight.config import SpeculativeConfig
from inflight.core.request import Request
from inflight.engine.engine import generate
from inflight.kv.layout import KVTables
from inflight.models.registry import read_spec
from thinned import thinned
from windowed import (
    LENGTHS,
    MAX_LEN,
    MODELS,
    keep_all,
    make_engine,
    requests,
    run_poisoned,
    write_model,
)

DEVICES = ("cpu", "gpu")
each_layout_and_device = pytest.mark.parametrize(
    ("checkpoint", "device"), thinned(MODELS, DEVICES, one_in=2), indirect=True
)


@pytest.fixture(scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_model(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """On a CPU, or the runner of GPUs with the kernels' definitions in the kernels' place."""
    if request.param == "gpu":
        family_gpu.install(monkeypatch)
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def kept() -> dict[tuple[Checkpoint, str], dict[int, list[int]]]:
    """Texts of engines that free no blocks, by checkpoint and device."""
    return {}


@pytest.fixture
def expected(
    checkpoint: Checkpoint, device: str, kept: dict[tuple[Checkpoint, str], dict[int, list[int]]]
) -> dict[int, list[int]]:
    """Outputs of an engine that frees no blocks, computed once per checkpoint and device."""
    if (checkpoint, device) not in kept:
        with pytest.MonkeyPatch.context() as patched:
            keep_all(patched)
            engine = make_engine(checkpoint, device)
            kept[checkpoint, device] = generate(engine, requests(LENGTHS))
    return kept[checkpoint, device]


@pytest.mark.parametrize(
    ("checkpoint", "device", "changes"),
    thinned(
        MODELS,
        DEVICES,
        [
            pytest.param({}, id="plain"),
            pytest.param({"max_prefill_chunk": 50}, id="chunks"),
            pytest.param(
                {"speculative_config": SpeculativeConfig(method="ngram", num_speculative_tokens=3)},
                id="drafts",
            ),
        ],
        one_in=4,
    ),
    indirect=["checkpoint", "device"],
)
def test_texts_are_the_same_and_freed_blocks_are_never_read(
    checkpoint: Checkpoint,
    device: str,
    expected: dict[int, list[int]],
    changes: dict[str, Any],
) -> None:
    texts, num_freed = run_poisoned(make_engine(checkpoint, device, **changes))
    assert num_freed > 0
    assert texts == expected


@each_layout_and_device
def test_a_prefix_is_found_in_the_cache_though_its_beginning_was_freed(
    checkpoint: Checkpoint, device: str, expected: dict[int, list[int]]
) -> None:
    engine = make_engine(checkpoint, device, enable_prefix_caching=True, num_blocks=1000)
    first = generate(engine, requests(LENGTHS))
    before = engine.stats().num_cached_tokens
    again = generate(engine, requests(LENGTHS, first_id=10))
    assert engine.stats().num_cached_tokens - before > 0.9 * sum(LENGTHS) - 6 * 48
    assert [*first.values()] == [*again.values()] == [*expected.values()]


@each_layout_and_device
def test_a_pool_holds_more_sequences_that_decode(
    checkpoint: Checkpoint, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory for two sequences of full length, more of them run at a time, with equal texts."""
    spec = read_spec(checkpoint)
    block_size = 16 if device == "gpu" else 4
    num_bytes = 2 * MAX_LEN * spec.kv_layout("float32").block_bytes(1)
    wanted = requests((200,) * 6, max_tokens=50)
    layout = spec.kv_layout("float32", frees_windows=True)
    tables = KVTables(layout.tables, block_size)

    def run(num_blocks: int) -> tuple[dict[int, list[int]], int]:
        engine = make_engine(checkpoint, device, num_blocks=num_blocks)
        for request in wanted:
            engine.submit(request)
        texts: dict[int, list[int]] = {request.request_id: [] for request in wanted}
        most = 0
        while engine.has_work:
            for event in engine.step():
                texts[event.request_id] += event.token_ids
            most = max(most, len(engine.scheduler.running))
        return texts, most

    num_blocks = num_bytes // layout.block_bytes(block_size)
    freed, num_freed = run(num_blocks)
    # As many as the layout promises: all but one decode, at 250 tokens, while one is admitted.
    kept = tables.num_kept_blocks(250)
    promised = 1 + (num_blocks - tables.num_blocks(200)) // kept
    keep_all(monkeypatch)
    texts, num_kept = run(2 * MAX_LEN // block_size)
    assert freed == texts
    assert num_kept == 2
    assert num_freed >= min(6, promised)
    # Where one layer of four has a window, less is freed than another sequence needs.
    assert num_freed > num_kept or len(layout.tables[-1].layers) == 1


@each_layout_and_device
def test_beams_share_and_free_blocks_too(
    checkpoint: Checkpoint, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    params: dict[str, Any] = {"beam_width": 2, "max_tokens": 24, "ignore_eos": False}
    one, other = requests((130, 180), **params)
    wanted = [
        Request(one.request_id, one.prompt_ids, one.params, output_ids=(0, 7)),
        Request(other.request_id, other.prompt_ids, other.params, output_ids=(1, 8)),
    ]
    engine = make_engine(checkpoint, device, enable_prefix_caching=True, num_blocks=260)
    found = generate(engine, wanted)
    assert engine.scheduler.num_free_blocks == 260
    keep_all(monkeypatch)
    assert found == generate(make_engine(checkpoint, device), wanted)
