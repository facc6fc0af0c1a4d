"""A request that crashes its engine is refused at the third attempt; the server goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from failpoint import failpoint
from kserve import Refused, Stream, ask, post, request, tensor
from supervised import Serving, serve

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

MARKER = 4242
POISON = [5, MARKER, 6]
QUARANTINED = r"the engine crashed 2 times while it ran this request.* for another \d+ s"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with (
        failpoint("abort", MARKER),
        # Else a stream may end before its engine is killed.
        failpoint("slow", 10),
        serve(tmp_path_factory.mktemp("quarantine"), "echo") as found,
    ):
        yield found


@pytest.fixture
def serving(server: Serving) -> Serving:
    server.wait_until_stable("engine")
    return server


def run(serving: Serving, ids: list[int], max_tokens: int = 4) -> list[int]:
    message = request(
        "llm",
        tensor("input_ids", "INT32", ids),
        tensor("max_tokens", "INT32", max_tokens),
        tensor("ignore_eos", "BOOL", True),
    )
    found = ask(serving.grpc, message)[0]["output_ids"]
    assert isinstance(found, list)
    return found


def test_the_third_attempt_is_refused_and_others_are_served(serving: Serving) -> None:
    canary = serving.canary()
    for _ in range(2):
        engine = serving.pid_of("engine")
        with (
            serving.restarting("engine"),
            pytest.raises(Refused, match="the engine exited while it processed this request"),
        ):
            run(serving, POISON)
        serving.wait_until_serving(canary)
        assert serving.pid_of("engine") != engine
    engine = serving.pid_of("engine")
    with pytest.raises(Refused, match=QUARANTINED):
        run(serving, POISON)
    serving.wait_until(lambda: serving.health()[0] == 200)  # as the HTTP door sees it
    body = {"input_ids": POISON, "max_tokens": 4, "ignore_eos": True}
    status, answer = post(serving.http, "llm", "generate", body)
    assert status == 400 and "the engine crashed 2 times" in answer
    assert run(serving, [5, 6]) == [5, 6, 5, 6]
    assert serving.canary() == canary
    assert serving.pid_of("engine") == engine
    log = serving.log.read_text()
    assert log.count("the engine before this one crashed: Fatal Python error: Aborted") == 2
    assert log.count("contents that were running when the engine crashed: 1; quarantined") == 2


def test_an_engine_killed_from_outside_quarantines_nothing(serving: Serving) -> None:
    canary = serving.canary()
    endless = (tensor("stream", "BOOL", True), tensor("ignore_eos", "BOOL", True))
    message = request(
        *("llm", tensor("input_ids", "INT32", [7, 8]), tensor("max_tokens", "INT32", 8000)),
        *endless,
    )
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
        stream = Stream(serving.grpc, message)
        stream.next()
        os.kill(serving.pid_of("engine"), number)
        with pytest.raises(Refused, match="the engine exited while it processed this request"):
            list(stream)
        serving.wait_until_serving(canary)
    stream = Stream(serving.grpc, message)
    assert stream.next()["output_ids"]
    stream.cancel()
