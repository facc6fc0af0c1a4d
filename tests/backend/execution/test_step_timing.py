"""What is timed when a GPU's runner starts, with dummies in the device's place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from inflight.core.step_size import StepSize
from inflight.execution import step_timing
from inflight.execution.step_timing import TimedLimits, measure_costs
from inflight.scheduling.draft_budget import StepCosts

LIMITS = TimedLimits(max_num_seqs=16, max_rows=80, max_drafts=5, max_len=2048)


@dataclass
class Device:
    """Notes the dummies of each step, and how long a call would take.

    Attributes:
        of_a_search: drafting takes as long for one draft as for several.
        sent: sequences, tokens of each and their first position, of each step.
        has_drafts: whether the last of them has drafts.
        sizes: of the steps.
        cleared: whether no dummies are left.
        seconds: of the last call.
    """

    of_a_search: bool = False
    sent: list[tuple[int, int, int]] = field(default_factory=list)
    sizes: list[StepSize] = field(default_factory=list)
    has_drafts: bool = True
    cleared: bool = False
    seconds: float = 0.0

    def send_dummies(self, count: int, num_tokens: int, start: int, *, has_drafts: bool) -> None:
        self.sent.append((count, num_tokens, start))
        self.has_drafts = has_drafts
        self.cleared = False

    def clear(self) -> None:
        self.cleared = True

    def run(self, size: StepSize) -> None:
        self.sizes.append(size)
        self.seconds = 100.0 + size.num_tokens - 50.0 * (size.max_q_len == 1)
        if size.num_chunks == 1:
            self.seconds -= 20.0 if self.has_drafts else 40.0

    def draft(self, batch: object, num_chunks: int, num_drafts: int) -> None:
        assert self.cleared, "it drafts for no sequence"
        self.seconds = 3.0 if self.of_a_search else 3.0 + 2.0 * num_drafts


def measured(
    monkeypatch: pytest.MonkeyPatch, device: Device, limits: TimedLimits = LIMITS
) -> StepCosts:
    def seconds(call: Callable[[], None]) -> float:
        call()
        return device.seconds

    monkeypatch.setattr(step_timing, "device_seconds", seconds)
    return measure_costs(device, device, device.run, limits)  # type: ignore[arg-type]


def test_a_step_takes_as_long_as_the_next_larger_one_that_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    costs = measured(monkeypatch, Device())
    assert costs.verifying_one is not None and costs.plain is not None
    assert costs.seconds(1, 5).tolist() == [31.0, 82.0, 84.0, 84.0, 86.0, 86.0]
    assert costs.seconds_trimmed(5).tolist() == [31.0, 62.0, 64.0, 64.0, 66.0, 66.0]
    assert costs.seconds(3, 6).tolist() == [54.0, 104.0, *[108.0] * 4, 116.0]
    assert costs.seconds(17, 1).tolist() == [124.0, 124.0], "more than are timed without drafts"


@pytest.mark.parametrize(("of_a_search", "expected"), [(True, 0.0), (False, 2.0)])
def test_what_one_more_draft_takes_is_measured(
    monkeypatch: pytest.MonkeyPatch, of_a_search: bool, expected: float
) -> None:
    assert measured(monkeypatch, Device(of_a_search)).draft_seconds == expected


@pytest.mark.parametrize("max_len", [4, 300, 2048])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 16])
def test_dummies_fit_into_steps_and_have_keys(
    monkeypatch: pytest.MonkeyPatch, max_len: int, max_num_seqs: int
) -> None:
    device, limits = Device(), TimedLimits(max_num_seqs, 80, 5, max_len)
    measured(monkeypatch, device, limits)
    assert device.cleared
    for (count, num_tokens, start), size in zip(device.sent, device.sizes, strict=True):
        assert 1 <= count <= min(size.num_chunks, max_num_seqs)
        assert 1 <= num_tokens <= size.max_q_len
        assert count * num_tokens <= size.num_tokens
        assert start == min(512, max_len - num_tokens)


def test_steps_without_room_for_drafts_are_timed_without(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = measured(monkeypatch, Device(), TimedLimits(1, 1, 5, 2048))
    assert costs.verifying_one is None
    assert costs.verifying == costs.plain
