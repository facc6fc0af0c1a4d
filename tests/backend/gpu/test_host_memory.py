"""On a GPU, KV blocks that come back from host memory give the tokens of those that never left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV2Config

import family
import latents
import windowed
from inflight.checkpoint.locate import Checkpoint
from inflight.core.batch import Batch, Load, Store
from inflight.engine.engine import Engine, generate
from inflight.execution.cuda_runner import CudaRunner
from inflight.kv.tiers.host_blocks import block_parts
from inflight.kv.tiers.host_transfers import HostTransfers
from returning_chats import NUM_CHATS, NUM_TURNS, Restarts, chat, turn

pytestmark = pytest.mark.gpu

HOST_BYTES = 256 << 20
LATENT = "latent"
# So that a text does not depend on the steps' other sequences, whose number differs.
SETTINGS: dict[str, Any] = {"batch_invariant": True, "enable_prefix_caching": True}


@pytest.fixture(autouse=True)
def loads_any_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models as small as these compute tokens sooner than they load them."""
    monkeypatch.setattr(CudaRunner, "_measure_loads", lambda self, config: None)


def make_engine(checkpoint: Checkpoint, **changes: Any) -> Engine:
    return windowed.make_engine(checkpoint, "gpu", **SETTINGS | changes)


def model(folder: Path, name: str) -> Checkpoint:
    if name == LATENT:
        settings = {"hidden_size": 256, "pad_token_id": 0} | latents.GPU_SHAPE
        made = family.make(DeepseekV2Config(**family.SHAPE | settings))
        return family.write_folder(made.to(torch.bfloat16), folder)
    shape = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    return windowed.write_model(folder, name, **shape)


@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [(name, kv_dtype) for name in windowed.MODELS for kv_dtype in ("auto", "fp8", "int8")]
    + [(LATENT, "auto")],
)
def test_later_turns_are_those_of_an_engine_that_keeps_all(
    tmp_path: Path, name: str, kv_dtype: str
) -> None:
    checkpoint = model(tmp_path, name)
    settings = {"kv_cache_dtype": kv_dtype, "num_blocks": 120}
    # With blocks for all: what a step of decoding computed is not compared with a prompt's.
    plain = make_engine(checkpoint, **settings | {"num_blocks": 600})
    expected = chat(plain, poisons=False, prompt_tokens=100)
    engine = make_engine(checkpoint, kv_host_memory_bytes=HOST_BYTES, **settings)
    assert chat(engine, poisons=True, prompt_tokens=100) == expected
    host = engine.scheduler.host_cache
    assert host is not None
    assert host.num_loaded >= NUM_CHATS * (NUM_TURNS - 1)
    assert engine.stats().num_cached_tokens >= NUM_CHATS * (NUM_TURNS - 1) * 80


@pytest.mark.parametrize("name", ["5 of 6 layers", "all layers", LATENT])
def test_preempted_requests_give_the_same_tokens(tmp_path: Path, name: str) -> None:
    checkpoint = model(tmp_path, name)
    requests = turn(1, [[i] * 40 for i in range(3, 9)], max_tokens=100)
    expected = generate(make_engine(checkpoint, num_blocks=200, max_num_seqs=1), requests)
    engine = make_engine(checkpoint, num_blocks=24, kv_host_memory_bytes=HOST_BYTES)
    assert generate(engine, requests) == expected
    assert engine.stats().num_preemptions > 0
    host = engine.scheduler.host_cache
    assert host is not None
    assert host.num_stored > 10


def test_beams_load_their_prompt(tmp_path: Path) -> None:
    """Where windows free blocks, beams do not use the prefix cache."""
    checkpoint = model(tmp_path, LATENT)
    expected = chat(
        make_engine(checkpoint, num_blocks=600), poisons=False, prompt_tokens=100, beam_width=2
    )
    engine = make_engine(checkpoint, num_blocks=120, kv_host_memory_bytes=HOST_BYTES)
    assert chat(engine, poisons=True, prompt_tokens=100, beam_width=2) == expected
    host = engine.scheduler.host_cache
    assert host is not None
    assert host.num_loaded > 0


@pytest.mark.parametrize(
    ("name", "kv_dtype"), [("5 of 6 layers", "auto"), ("all layers", "fp8"), (LATENT, "auto")]
)
def test_a_later_engine_reads_what_earlier_ones_wrote_to_disk(
    tmp_path: Path, name: str, kv_dtype: str
) -> None:
    """Each turn is computed by an engine of its own; it is idle when it copies the last blocks."""
    (folder := tmp_path / "model").mkdir()
    checkpoint = model(folder, name)
    plain = make_engine(checkpoint, kv_cache_dtype=kv_dtype, num_blocks=600)
    expected = chat(plain, poisons=False, prompt_tokens=100)
    on_disk = {
        "kv_cache_dtype": kv_dtype,
        "num_blocks": 120,
        "kv_host_memory_bytes": HOST_BYTES,
        "kv_disk_dir": str(tmp_path / "disk"),
        "kv_disk_bytes": HOST_BYTES,
    }
    restarts = Restarts(lambda: make_engine(checkpoint, **on_disk))
    first = make_engine(checkpoint, **on_disk)
    assert chat(first, poisons=False, between=restarts, prompt_tokens=100) == expected
    assert restarts.num_read >= NUM_CHATS * (NUM_TURNS - 1)


def _filled(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), device="cuda").view(shape).float()


def test_copies_are_in_order_with_steps_and_with_one_another() -> None:
    """A step that writes to a block after its store, and one that reads a block it loads."""
    caches = [_filled(3, 2, 8, 4, 2, 16), _filled(2, 8, 4, 1, 24)]
    before = [cache.clone() for cache in caches]
    torch.cuda.synchronize()  # a store does not wait for the step before it
    parts = block_parts(caches)
    transfers = HostTransfers(parts, 4 * parts[-1].end)
    assert transfers.blocks.num_slots == 4
    with torch.cuda.stream(torch.cuda.Stream()):
        transfers.launch(Batch([], stores=[Store(7, 5, 2), Store(8, 1, 0)]))
        while (tickets := transfers.take_stored()) != [7, 8]:
            assert tickets == []
        for cache in caches:
            cache.fill_(-1.0)
        transfers.launch(Batch([], loads=[Load(2, 3)], reads_loads=True))
        read = [cache[..., 3, :, :, :].clone() for cache in caches]
        transfers.launch(Batch([], loads=[Load(0, 6)]))
        transfers.launch(Batch([]))
        later = [cache[..., 6, :, :, :].clone() for cache in caches]
    torch.cuda.synchronize()
    for values, cache in zip(read, before, strict=True):
        torch.testing.assert_close(values, cache[..., 5, :, :, :], rtol=0, atol=0)
    for values, cache in zip(later, before, strict=True):
        torch.testing.assert_close(values, cache[..., 1, :, :, :], rtol=0, atol=0)
    untouched = [cache[..., [0, 1, 2, 4, 5, 7], :, :, :] for cache in caches]
    assert all(bool((values == -1.0).all()) for values in untouched)


def test_a_slot_is_overwritten_after_it_was_read() -> None:
    caches = [_filled(64, 2, 8, 16, 8, 128)]
    parts = block_parts(caches)
    transfers = HostTransfers(parts, parts[-1].end)
    original = caches[0][..., 5, :, :, :].clone()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        transfers.launch(Batch([], stores=[Store(0, 5, 0)]))
        for turn_ in range(20):
            # The slot's block goes to 2, and the slot takes another: twenty times in a row.
            loads, stores = [Load(0, 2)], [Store(turn_ + 1, 6, 0)]
            transfers.launch(Batch([], loads=loads, stores=stores, reads_loads=True))
            expected = original if turn_ == 0 else caches[0][..., 6, :, :, :]
            assert torch.equal(caches[0][..., 2, :, :, :], expected)


def test_a_runner_knows_from_which_length_on_loading_pays_off(tmp_path: Path) -> None:
    checkpoint = model(tmp_path, "all layers")
    engine = make_engine(checkpoint, kv_host_memory_bytes=HOST_BYTES)
    runner: Any = engine.runner
    with torch.inference_mode(), torch.cuda.stream(runner._stream):
        MEASURE(runner, engine.config)
    memory = runner.host_memory
    assert 1 <= memory.min_tokens <= windowed.MAX_LEN


MEASURE = CudaRunner._measure_loads
