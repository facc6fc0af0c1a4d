"""A server whose engine is killed answers from the KV blocks that it wrote to disk."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import small_checkpoint
from kserve import ask, request, tensor, text
from supervised import Serving, serve, without_chat
from waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

PROMPT = "The quick brown fox jumps over the lazy dog again and again. " * 30
BYTES = 256 << 20


def answer(server: Serving) -> str:
    message = request("generate", text(PROMPT), tensor("max_tokens", "INT32", 8))
    return str(ask(server.grpc, message)[0]["text_output"])


def test_blocks_outlive_an_engine_that_is_killed(tmp_path: Path) -> None:
    tiers = {"kv_host_memory_bytes": BYTES, "kv_disk_dir": "kv", "kv_disk_bytes": BYTES}
    # Weights that are drawn are the same each time, and loaded at once.
    model = {"model": str(small_checkpoint.write(tmp_path / "small")), "random_weights": True}
    with serve(tmp_path, "cpu", prepare=without_chat, **model, **tiers) as server:
        expected, canary = answer(server), server.canary()
        num_full = 20  # and more
        # Nothing else runs: an idle engine sees to its tiers.
        wait_until(lambda: server.stats().num_disk_blocks_written >= num_full)
        os.kill(server.pid_of("engine"), signal.SIGKILL)
        server.wait_until_serving(canary)
        assert answer(server) == expected
        stats = server.stats()
        assert stats.num_disk_blocks_read >= num_full
        assert stats.num_cached_tokens >= 16 * num_full
