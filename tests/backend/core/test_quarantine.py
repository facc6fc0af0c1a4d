"""A request that was running at two crashes is refused for a while; others are not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from inflight.core import quarantine
from inflight.core.output_constraint import StructuredOutput
from inflight.core.quarantine import MAX_SUSPECTS, QUARANTINE_S, Quarantine, digest_of
from inflight.core.request import Request
from inflight.errors import QuarantinedError
from inflight.sampling.params import SamplingParams

POISON, OTHER = [1, 2, 3], [4, 5]


class Engines:
    """The quarantines of one engine after the other, with a clock."""

    def __init__(self, folder: Path) -> None:
        self.now = 1000.0
        self._path = folder / "engine.sock"
        self._num_requests = 0
        self.current = self._start(has_crashed=False)

    def restart(self, *, has_crashed: bool) -> None:
        self.current = self._start(has_crashed=has_crashed)

    def run(self, *prompts: list[int]) -> list[Request]:
        """Start requests with these prompts."""
        started = []
        for prompt in prompts:
            self._num_requests += 1
            started.append(request(self._num_requests, prompt))
            self.current.started(started[-1])
        return started

    def is_refused(self, prompt: list[int]) -> bool:
        try:
            self.current.check(request(999, prompt))
        except QuarantinedError:
            return True
        return False

    def _start(self, *, has_crashed: bool) -> Quarantine:
        return Quarantine(self._path, has_crashed=has_crashed, clock=lambda: self.now)


@pytest.fixture
def engines(tmp_path: Path) -> Engines:
    return Engines(tmp_path)


def request(request_id: int, prompt: list[int], **params: object) -> Request:
    return Request(request_id, prompt, SamplingParams(**params))  # type: ignore[arg-type]


def test_two_crashes_quarantine_a_request(engines: Engines) -> None:
    engines.run(POISON)
    engines.restart(has_crashed=True)
    assert not engines.is_refused(POISON), "one crash may have another cause"
    engines.run(POISON)
    engines.restart(has_crashed=True)
    assert engines.is_refused(POISON)
    assert not engines.is_refused(OTHER)


def test_the_error_says_how_often_and_how_long(engines: Engines) -> None:
    for _ in range(2):
        engines.run(POISON)
        engines.restart(has_crashed=True)
    engines.now += 17.5
    text = (
        "the engine crashed 2 times while it ran this request, which is refused for another 583 s; "
        "change the request"
    )
    with pytest.raises(QuarantinedError, match=f"^{re.escape(text)}$"):
        engines.current.check(request(9, POISON))


def test_a_killed_engine_accuses_nobody(engines: Engines) -> None:
    for _ in range(5):
        engines.run(POISON)
        engines.restart(has_crashed=False)
    assert not engines.is_refused(POISON)


def test_a_quarantine_outlives_engines_and_expires(engines: Engines) -> None:
    for _ in range(2):
        engines.run(POISON)
        engines.restart(has_crashed=True)
    engines.restart(has_crashed=False)
    engines.now += QUARANTINE_S - 1
    assert engines.is_refused(POISON)
    engines.now += 1
    assert not engines.is_refused(POISON)
    engines.run(POISON)
    engines.restart(has_crashed=True)
    assert engines.is_refused(POISON), "one further crash is enough"


def test_a_request_that_had_ended_is_no_suspect(engines: Engines) -> None:
    for _ in range(2):
        (cancelled, completed) = engines.run(POISON, OTHER)
        engines.current.ended(cancelled.request_id)
        engines.current.completed(completed.request_id)
        engines.restart(has_crashed=True)
    assert not engines.is_refused(POISON) and not engines.is_refused(OTHER)


def test_a_suspect_that_completes_is_cleared(engines: Engines) -> None:
    engines.run(POISON, OTHER)
    engines.restart(has_crashed=True)
    (other,) = engines.run(OTHER)
    engines.current.completed(other.request_id)
    engines.run(POISON, OTHER)
    engines.restart(has_crashed=True)
    assert engines.is_refused(POISON)
    assert not engines.is_refused(OTHER), "one crash since it completed"


def test_a_crash_counts_once_for_equal_requests(engines: Engines) -> None:
    engines.run(POISON, POISON, POISON)
    engines.restart(has_crashed=True)
    assert not engines.is_refused(POISON)


def test_requests_of_failed_steps_are_suspects_until_a_step_succeeds(engines: Engines) -> None:
    for succeeds, is_refused in ((True, False), (False, True)):
        for _ in range(2):
            (failed,) = engines.run(POISON)
            engines.current.step_failed({failed.request_id})
            engines.current.ended(failed.request_id)
            if succeeds:
                engines.current.step_succeeded()
            engines.restart(has_crashed=True)
        assert engines.is_refused(POISON) == is_refused


def test_the_number_of_suspects_is_bounded(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MAX_SUSPECTS <= 4096
    monkeypatch.setattr(quarantine, "MAX_SUSPECTS", 3)
    prompts = [[number] for number in range(1, 6)]
    for prompt in prompts:
        for _ in range(2):
            engines.run(prompt)
            engines.restart(has_crashed=True)
    assert [engines.is_refused(prompt) for prompt in prompts] == [False, False, True, True, True]


def test_a_broken_file_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "engine.suspects").write_bytes(b"\xffnonsense")
    Quarantine(tmp_path / "engine.sock").check(request(1, POISON))


def test_attempts_at_the_same_content_have_one_digest() -> None:
    first = Request(1, POISON, SamplingParams(seed=5), acknowledged=True)
    again = Request(2, POISON, SamplingParams(seed=6), sibling=1, output_ids=(2, 3))
    assert digest_of(first) == digest_of(again) == digest_of(request(3, POISON))


@pytest.mark.parametrize(
    "other",
    [
        request(1, [1, 2]),
        request(1, POISON, max_tokens=3),
        request(1, POISON, temperature=0.5),
        Request(1, POISON, SamplingParams(), cache_salt="another"),
        Request(1, POISON, SamplingParams(), speculation=0),
        Request(1, POISON, SamplingParams(), structured=StructuredOutput("regex", "a")),
    ],
)
def test_other_contents_have_other_digests(other: Request) -> None:
    assert digest_of(other) != digest_of(request(1, POISON))
