"""A counter in a mapped file."""

from __future__ import annotations

from pathlib import Path

from inflight.ipc.metrics.mapped_counter import MappedCounter, read_sum


def test_counters_of_several_processes_are_summed_and_continued(tmp_path: Path) -> None:
    assert read_sum(tmp_path, "gateway*.ignored") == 0
    MappedCounter(tmp_path / "gateway.ignored").add(2)
    MappedCounter(tmp_path / "gateway-1.ignored").add(3)
    MappedCounter(tmp_path / "gateway.ignored").add(1)
    assert read_sum(tmp_path, "gateway*.ignored") == 6
