"""KV blocks that come back from host memory give the tokens of those that never left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import DeepseekV2Config

import family
import latents
import windowed
from inflight.checkpoint.locate import Checkpoint
from inflight.config import EngineConfig, SpeculativeConfig
from inflight.engine.engine import Engine, generate
from inflight.errors import ConfigError
from inflight.execution.factory import build
from returning_chats import NUM_CHATS, NUM_TURNS, Restarts, chat, end_storing, turn
from thinned import thinned

BLOCK_SIZE = 4
NUM_BLOCKS = 60
HOST_BYTES = 64 << 20  # more than all blocks of these models

LAYOUTS = ("one table", "latent", *windowed.MODELS)
each_layout = pytest.mark.parametrize(
    ("layout", "kv_dtype"), thinned(LAYOUTS, ("auto", "fp8", "int8"), one_in=3)
)
# Bytes are the same to copies, so that one of them stands for both types of 8 bits.
each_table = pytest.mark.parametrize(
    ("layout", "kv_dtype"),
    [
        ("one table", "int8"),
        ("latent", "auto"),
        ("5 of 6 layers", "fp8"),
        ("3 of 4 layers, with sinks", "auto"),
        *(
            pytest.param(*pair, marks=pytest.mark.long)
            for pair in (
                ("one table", "auto"),
                ("latent", "int8"),
                ("5 of 6 layers", "auto"),
                ("1 of 4 layers", "auto"),
                ("all layers", "auto"),
            )
        ),
    ],
)


@pytest.fixture(scope="module")
def checkpoints(
    tiny_llama: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Checkpoint]:
    """A tiny model by the layout of its KV cache."""
    found = {"one table": tiny_llama}

    def checkpoint(layout: str) -> Checkpoint:
        if layout not in found:
            folder = tmp_path_factory.mktemp("model")
            if layout == "latent":
                shape = {"pad_token_id": 0, **family.SHAPE, **latents.SHAPE, **latents.EXPERTS}
                model = family.make(DeepseekV2Config(**shape))
                found[layout] = family.write_folder(model, folder)
            else:
                found[layout] = windowed.write_model(folder, layout)
        return found[layout]

    return checkpoint


def make_engine(checkpoint: Checkpoint, kv_dtype: str = "auto", **changes: Any) -> Engine:
    settings: dict[str, Any] = {
        "num_threads": 1,
        "block_size": BLOCK_SIZE,
        "num_blocks": NUM_BLOCKS,
        "max_num_seqs": 4,
        "max_model_len": 160,
        "kv_cache_dtype": kv_dtype,
        "kv_host_memory_bytes": HOST_BYTES,
    }
    config = EngineConfig(model=str(checkpoint.path), **settings | changes)
    runner, _ = build(config, checkpoint, lambda what, done: None)
    return Engine(config, runner, 160, eos_token_ids=())


@each_layout
def test_later_turns_are_those_of_an_engine_that_computes_or_keeps_all(
    checkpoints: Callable[[str], Checkpoint], layout: str, kv_dtype: str
) -> None:
    """Computed again, keys and values have other last bits, which 8 bits may round to the next
    value: these are compared with those that never left a pool of room for all."""
    checkpoint = checkpoints(layout)
    changes: dict[str, Any] = {"kv_host_memory_bytes": None}
    if kv_dtype == "auto":
        changes["enable_prefix_caching"] = False
    else:
        changes["num_blocks"] = 10 * NUM_BLOCKS
    expected = chat(make_engine(checkpoint, kv_dtype, **changes), poisons=False)
    engine = make_engine(checkpoint, kv_dtype)
    assert chat(engine, poisons=True) == expected
    host = engine.scheduler.host_cache
    assert host is not None
    assert host.num_loaded > NUM_CHATS * (NUM_TURNS - 1)
    # Of a later turn all but the last, partial block and what is new.
    assert engine.stats().num_cached_tokens > NUM_CHATS * (NUM_TURNS - 1) * 28


@each_table
def test_preempted_requests_load_what_they_had(
    checkpoints: Callable[[str], Checkpoint], layout: str, kv_dtype: str
) -> None:
    checkpoint = checkpoints(layout)
    greedy = {"max_tokens": 30}
    changes = {"kv_host_memory_bytes": None, "max_num_seqs": 1}
    requests = [turn(0, [[]])[0], *turn(1, [[i, i] for i in range(3, 8)], **greedy)]
    expected = generate(make_engine(checkpoint, kv_dtype, **changes), requests)
    engine = make_engine(checkpoint, kv_dtype, num_blocks=26)
    assert generate(engine, requests) == expected
    assert engine.stats().num_preemptions > 0
    host = engine.scheduler.host_cache
    assert host is not None
    assert host.num_stored > 10


@pytest.mark.parametrize(
    "drafter",
    [
        {"method": "self", "num_layers": 2},
        {"method": "draft_model"},
        {"method": "ngram", "prompt_lookup_min": 1},
    ],
    ids=lambda drafter: drafter["method"],
)
def test_the_blocks_of_a_drafter_come_back_with_them(
    tiny_llama: Checkpoint, drafter: dict[str, Any]
) -> None:
    """With the model itself as its drafter, all drafts are right, before and after."""
    if drafter["method"] == "draft_model":
        drafter = drafter | {"model": str(tiny_llama.path)}
    speculation = SpeculativeConfig(default=3, num_speculative_tokens=3, **drafter)
    plain = {"kv_host_memory_bytes": None, "enable_prefix_caching": False}
    expected = chat(make_engine(tiny_llama, **plain), poisons=False)
    engine = make_engine(tiny_llama, speculative_config=speculation)
    assert chat(engine, poisons=True) == expected
    host = engine.scheduler.host_cache
    assert host is not None
    assert host.num_loaded > 0
    if drafter["method"] == "draft_model":
        stats = engine.stats()
        assert stats.num_accepted_tokens > 0.95 * stats.num_drafted_tokens > 0


@pytest.mark.parametrize("layout", ["one table", pytest.param("latent", marks=pytest.mark.long)])
def test_beams_load_their_prompt(checkpoints: Callable[[str], Checkpoint], layout: str) -> None:
    checkpoint = checkpoints(layout)
    plain = {"kv_host_memory_bytes": None, "enable_prefix_caching": False}
    expected = chat(make_engine(checkpoint, **plain), poisons=False, beam_width=2)
    engine = make_engine(checkpoint)
    assert chat(engine, poisons=True, beam_width=2) == expected
    host = engine.scheduler.host_cache
    assert host is not None
    assert host.num_loaded > 0


@each_table
def test_a_later_engine_reads_what_earlier_ones_wrote_to_disk(
    checkpoints: Callable[[str], Checkpoint], layout: str, kv_dtype: str, tmp_path: Path
) -> None:
    """Each turn is computed by an engine of its own."""
    checkpoint = checkpoints(layout)
    plain = {"kv_host_memory_bytes": None, "enable_prefix_caching": False}
    expected = chat(make_engine(checkpoint, kv_dtype, **plain), poisons=False)
    on_disk = {"kv_disk_dir": str(tmp_path), "kv_disk_bytes": HOST_BYTES}
    restarts = Restarts(lambda: make_engine(checkpoint, kv_dtype, **on_disk))
    first = make_engine(checkpoint, kv_dtype, **on_disk)
    assert chat(first, poisons=False, between=restarts) == expected
    assert restarts.num_read >= NUM_CHATS * (NUM_TURNS - 1)


def test_blocks_of_another_model_are_not_read(
    checkpoints: Callable[[str], Checkpoint], tmp_path: Path
) -> None:
    on_disk = {"kv_disk_dir": str(tmp_path), "kv_disk_bytes": HOST_BYTES}
    for changes in ({}, {"kv_cache_dtype": "int8"}, {"block_size": 8}):
        engine = make_engine(checkpoints("one table"), **on_disk, **changes)
        generate(engine, turn(0, [[]]))
        end_storing(engine)
        host = engine.scheduler.host_cache
        assert host is not None
        assert host.disk is not None
        assert (host.disk.num_written > 0, host.disk.num_read) == (True, 0)
        host.disk.close()
    assert len(list(tmp_path.iterdir())) == 3


def test_settings_of_the_disk_are_complete(tiny_llama: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set both of them, or neither"):
        make_engine(tiny_llama, kv_disk_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="set kv_host_memory_bytes as well"):
        make_engine(
            tiny_llama,
            kv_disk_dir=str(tmp_path),
            kv_disk_bytes=1 << 20,
            kv_host_memory_bytes=None,
        )


def test_too_little_memory_is_refused(tiny_llama: Checkpoint) -> None:
    with pytest.raises(ConfigError, match="kv_host_memory_bytes: 100 bytes are not enough"):
        make_engine(tiny_llama, kv_host_memory_bytes=100)


def test_more_memory_than_there_is_is_refused(tiny_llama: Checkpoint) -> None:
    with pytest.raises(ConfigError, match=r"kv_host_memory_bytes: .* cannot be allocated"):
        make_engine(tiny_llama, kv_host_memory_bytes=1 << 60)


def test_it_is_a_tier_of_the_prefix_cache(tiny_llama: Checkpoint) -> None:
    with pytest.raises(ConfigError, match="set enable_prefix_caching"):
        make_engine(tiny_llama, enable_prefix_caching=False)
