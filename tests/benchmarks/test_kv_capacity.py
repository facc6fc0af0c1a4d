"""Sequences that a KV cache holds."""

from __future__ import annotations

from inflight.kv.layout import KVGroup, KVLayout
from kv_capacity import KVCapacity

FULL = KVGroup((2,), num_kv_heads=2, k_dim=4, v_dim=4)
WINDOWED = KVGroup((0, 1), num_kv_heads=2, k_dim=4, v_dim=4, window=30)


def capacity(*groups: KVGroup, num_blocks: int = 100) -> KVCapacity:
    return KVCapacity(KVLayout(groups, "bfloat16"), num_blocks, block_size=16)


def test_a_sequence_takes_whole_blocks():
    kv = capacity(FULL)
    assert kv.bytes_per_token == 2 * (4 + 4) * 2
    assert [kv.sequences(length) for length in (16, 17, 160, 161, 1600, 1601)] == [
        *(100, 50, 10, 9, 1, 0)
    ]


def test_layers_with_a_window_would_keep_its_blocks_only():
    kv = capacity(WINDOWED, FULL)
    assert kv.sequences(160) == 10
    # Of ten blocks, a window of 30 tokens touches three, in two of three layers.
    assert kv.sequences_if_freed(160) == 100 * 3 // (3 * 2 + 10)
    # A sequence within the window keeps all blocks.
    assert kv.sequences_if_freed(32) == kv.sequences(32) == 50


def test_what_is_not_implemented_is_called_so():
    kv = capacity(WINDOWED, FULL)
    assert kv.report(160) == {
        "bytes_per_token": 96,
        "sequence_tokens": 160,
        "sequences": 10,
        "not_implemented": {"sequences_if_windows_were_freed": 18},
    }
    assert kv.line(160).endswith("18 if blocks outside windows were freed (not implemented)")


def test_a_model_without_windows_has_nothing_to_free():
    kv = capacity(FULL)
    assert "not_implemented" not in kv.report(160)
    assert kv.line(160) == "KV cache: 10 sequences of 160 tokens, 32 bytes per token"
