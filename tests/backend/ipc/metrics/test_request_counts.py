"""Requests are counted by status, over all processes of a door."""

from __future__ import annotations

from pathlib import Path

import grpc

from inflight.ipc.metrics.request_counts import GRPC_STATUSES, RequestCounts, read


def test_counts_are_read_by_status(tmp_path: Path) -> None:
    counts = RequestCounts(tmp_path / "http.requests")
    for status in (200, 200, 503):
        counts.count(status)
    assert read(tmp_path, "http") == {"200": 2, "503": 1}
    assert read(tmp_path, "grpc") == {}


def test_a_successor_continues(tmp_path: Path) -> None:
    for _ in range(2):
        RequestCounts(tmp_path / "http.requests").count(200)
    assert read(tmp_path, "http") == {"200": 2}


def test_workers_are_added_up_under_grpcs_names(tmp_path: Path) -> None:
    for worker in range(3):
        counts = RequestCounts(tmp_path / f"grpc.{worker}.requests")
        counts.count(0)
        counts.count(14)
    assert read(tmp_path, "grpc") == {"OK": 3, "UNAVAILABLE": 3}


def test_a_file_that_is_being_created_counts_nothing(tmp_path: Path) -> None:
    (tmp_path / "http.requests").touch()
    assert read(tmp_path, "http") == {}


def test_the_names_are_grpcs() -> None:
    assert {code.value[0]: code.name for code in grpc.StatusCode} == dict(enumerate(GRPC_STATUSES))
