"""Sequences that a KV cache holds."""

from __future__ import annotations

from inflight.checkpoint.locate import locate
from inflight.kv.layout import KVGroup, KVLayout
from inflight.models.registry import read_spec
from kv_capacity import HERE, KVCapacity, measure

FULL = KVGroup((2,), num_kv_heads=2, k_dim=4, v_dim=4)
WINDOWED = KVGroup((0, 1), num_kv_heads=2, k_dim=4, v_dim=4, window=30)


def capacity(*groups: KVGroup, num_blocks: int = 100) -> KVCapacity:
    return KVCapacity(KVLayout(groups, "bfloat16", frees_windows=True), num_blocks, block_size=16)


def test_a_sequence_takes_whole_blocks():
    kv = capacity(FULL)
    assert kv.bytes_per_token == 2 * (4 + 4) * 2
    assert [kv.sequences(length) for length in (16, 17, 160, 161, 1600, 1601)] == [
        *(100, 50, 10, 9, 1, 0)
    ]


def test_layers_with_a_window_keep_its_blocks_only():
    kv = capacity(WINDOWED, FULL)
    # Blocks of 32 tokens, of which five are kept, and of 16 tokens, of which two are kept: 130 to
    # 159, from the last multiple of 128 on. A sequence is admitted with all fifteen.
    assert kv.sequences(160) == 1 + (100 - 15) // (5 + 2)
    # The same memory, in blocks of 16 tokens of three layers instead of two.
    kept = kv.without_freed_windows()
    assert (kept.num_blocks, kept.sequences(160)) == (66, 6)
    assert kv.bytes_per_token == kept.bytes_per_token == 96


def test_a_report_says_what_the_same_memory_holds_if_nothing_is_freed():
    kv = capacity(WINDOWED, FULL)
    assert kv.report(160) == {
        "bytes_per_token": 96,
        "sequence_tokens": 160,
        "sequences": 13,
        "sequences_without_freed_windows": 6,
    }
    assert kv.line(160).endswith(
        "13 sequences of 160 tokens, 96 bytes per token; 6 without freed windows"
    )


def test_a_model_without_windows_has_nothing_to_free():
    kv = capacity(FULL)
    assert "sequences_without_freed_windows" not in kv.report(160)
    assert kv.line(160) == "KV cache: 10 sequences of 160 tokens, 32 bytes per token"


def test_an_engine_holds_what_the_arithmetic_says():
    spec = read_spec(locate(str(HERE / "models/gemma-3-12b")))
    layout = spec.kv_layout("bfloat16", frees_windows=True)
    kv = KVCapacity(layout, 2500, block_size=16)
    held = measure(spec, kv, 8192)
    assert held["sequences"] == kv.sequences(8192) == 12
    assert held["preemptions"] == 0
    assert kv.without_freed_windows().sequences(8192) == 4
