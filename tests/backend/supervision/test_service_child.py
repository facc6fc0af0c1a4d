"""Children that beat end side by side."""

from __future__ import annotations

from pathlib import Path

from inflight.supervision.service_child import ServiceChild, close_all


class Recorded(ServiceChild):
    """Writes down what is done with it."""

    def __init__(self, name: str, calls: list[str]) -> None:
        super().__init__(name, "module", heartbeat=Path(), log_file=Path(), options=())
        self._calls = calls

    def terminate(self) -> None:
        self._calls.append(f"terminate {self.name}")

    def wait_or_kill(self) -> None:
        self._calls.append(f"wait for {self.name}")


def test_all_are_told_to_end_before_one_is_awaited() -> None:
    calls: list[str] = []
    close_all([Recorded("one", calls), Recorded("two", calls)])
    assert calls == ["terminate one", "terminate two", "wait for one", "wait for two"]


def test_one_that_was_not_started_has_ended(tmp_path: Path) -> None:
    child = ServiceChild("one", "module", heartbeat=tmp_path, log_file=tmp_path, options=())
    close_all([child])
    assert child.pid == 0
