"""Replies without a server: silence before the first delta, spans."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from inflight.door.gateway import reply
from inflight.door.gateway.generation import Delta
from inflight.door.gateway.problem import Problem
from inflight.door.gateway.reply import StreamedReply, WholeReply
from inflight.door.gateway.traced import TracedStream
from inflight.door.http.busy_poll import BusyPoll
from inflight.door.tracing import Tracing


class FakeStream:
    """Yields these lists of deltas, after pauses in seconds, and raises these problems."""

    def __init__(self, *steps: list[Delta] | float | Problem) -> None:
        self._steps = list(steps)
        self.num_closed = 0

    async def start(self) -> None:
        pass

    def __aiter__(self) -> AsyncIterator[list[Delta]]:
        return self

    async def __anext__(self) -> list[Delta]:
        while self._steps:
            step = self._steps.pop(0)
            if isinstance(step, float):
                await asyncio.sleep(step)
            elif isinstance(step, Problem):
                raise step
            else:
                return step
        raise StopAsyncIteration

    def close(self) -> None:
        self.num_closed += 1


class Texts:
    """Events that are the deltas' texts."""

    def feed(self, deltas: list[Delta]) -> bytes:
        return "".join(delta.text_output for delta in deltas).encode()

    def finish(self) -> bytes:
        return b"[end]"

    def result(self) -> bytes:
        return b"[whole]"

    def error(self, problem: Problem) -> bytes:
        return b"[error]"


def run(made: reply.StreamedReply | reply.WholeReply) -> list[dict[str, Any]]:
    """The messages of a response to a client that stays."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(made({"type": "http"}, receive, send))  # type: ignore[arg-type]
    return sent


def bodies(sent: list[dict[str, Any]]) -> list[bytes]:
    return [message["body"] for message in sent if "body" in message]


def test_a_silent_prompt_is_kept_alive_with_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply, "KEEP_ALIVE_S", 0.02)
    stream = FakeStream(0.05, [Delta("a")])
    found = bodies(run(StreamedReply(stream, Texts(), BusyPoll(0.0))))
    assert found[0] == b": keep-alive\n\n"
    assert found[-2:] == [b"a", b"[end]"]
    assert stream.num_closed > 0


def test_an_error_after_a_comment_is_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply, "KEEP_ALIVE_S", 0.02)
    sent = run(StreamedReply(FakeStream(0.05, Problem("x")), Texts(), BusyPoll(0.0)))
    assert sent[0]["status"] == 200
    assert bodies(sent)[-1] == b"[error]"
    assert sent[-1]["more_body"] is False


def test_deltas_that_arrived_together_are_one_message() -> None:
    stream = FakeStream([Delta("a"), Delta("b")], [Delta("c")])
    assert bodies(run(StreamedReply(stream, Texts(), BusyPoll(0.0)))) == [b"ab", b"c", b"[end]"]


@pytest.mark.parametrize("kind", [StreamedReply, WholeReply])
def test_an_error_before_the_first_delta_is_raised(kind: Any) -> None:
    stream = FakeStream(Problem("x", 503))
    with pytest.raises(Problem):
        run(kind(stream, Texts(), BusyPoll(0.0)))
    assert stream.num_closed > 0


def test_a_whole_response_is_one_message() -> None:
    assert bodies(run(WholeReply(FakeStream([Delta("a")]), Texts(), BusyPoll(0.0)))) == [b"[whole]"]


@pytest.mark.parametrize(
    ("steps", "status"),
    [
        (([Delta("a", 0, "", 5, 1)], [Delta("", 0, "stop", 5, 0)]), "200"),
        (([Delta("a", 0, "", 5, 1)], Problem("x", 503)), "503"),
    ],
)
def test_a_span_has_the_usage_and_the_status(steps: Any, status: str) -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing(SimpleSpanProcessor(exporter))
    span = tracing.begin([], "id")
    span.requested("chat")
    run(StreamedReply(TracedStream(FakeStream(*steps), span), Texts(), BusyPoll(0.0)))
    (found,) = exporter.get_finished_spans()
    attributes = found.attributes or {}
    assert found.name == "chat chat"
    assert attributes["inflight.status"] == status
    assert attributes["gen_ai.usage.input_tokens"] == 5
    assert attributes["gen_ai.usage.output_tokens"] == 1
    assert "gen_ai.server.time_to_first_token" in attributes
    tracing.close()
