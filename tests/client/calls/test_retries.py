"""Which failures are retried, and when."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

import fake_triton
from fake_triton import Call, answer, failing, two_words
from inflight.deploy.ports import HeldPorts
from inflight_client import (
    AsyncClient,
    Cancelled,
    Client,
    ClientError,
    ConnectionFailed,
    InvalidRequest,
    ServerError,
    TimedOut,
    Unavailable,
)
from inflight_client.calls import retries
from inflight_client.calls.retries import Retries
from waiting import wait_until

Use = Callable[..., Any]
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
FULL = "the queue is full"


def unavailable(retry_after: float | None = None) -> Unavailable:
    error = Unavailable("full")
    error.retry_after = retry_after
    return error


def test_a_request_that_fails_is_sent_again_until_it_succeeds(use: Use) -> None:
    actions: list[Callable[[Any], Any]] = [
        lambda client: client.generate("Hi"),
        lambda client: client.chat([{"role": "user", "content": "Hi"}]),
        lambda client: client.stream("Hi").completion(),
    ]
    for action in actions:
        with fake_triton.serve(failing(2, UNAVAILABLE, FULL)) as server:
            assert use(server.url, action).text == "Hello wörld"
            assert len(server.calls) == 3


def test_the_last_error_is_raised(use: Use) -> None:
    for max_retries in (0, 1):
        with fake_triton.serve(failing(9, UNAVAILABLE, FULL)) as server:
            with pytest.raises(Unavailable, match=FULL):
                use(server.url, lambda client: client.generate("Hi"), max_retries=max_retries)
            assert len(server.calls) == 1 + max_retries


def test_unary_calls_are_retried(use: Use) -> None:
    with fake_triton.serve(failing(9, UNAVAILABLE, FULL)) as server:
        with pytest.raises(Unavailable, match=FULL):
            use(server.url, lambda client: client.detokenize([1]))
        assert len(server.calls) == 3


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest),
        (grpc.StatusCode.INTERNAL, ServerError),
        (grpc.StatusCode.CANCELLED, Cancelled),
        (grpc.StatusCode.DEADLINE_EXCEEDED, TimedOut),
    ],
)
def test_other_errors_are_not_retried(
    use: Use, code: grpc.StatusCode, kind: type[ClientError]
) -> None:
    with fake_triton.serve(failing(1, code, "failed")) as server:
        with pytest.raises(kind):
            use(server.url, lambda client: client.generate("Hi"))
        assert len(server.calls) == 1


def test_nothing_is_retried_after_the_first_delta(use: Use) -> None:
    def script(call: Call) -> Iterator[Any]:
        yield answer("Hello")
        call.context.abort(UNAVAILABLE, FULL)

    with fake_triton.serve(script) as server:
        with pytest.raises(Unavailable, match=FULL):
            use(server.url, lambda client: client.generate("Hi"))
        assert len(server.calls) == 1


def test_an_error_in_a_stream_that_ends_well_is_retried(use: Use) -> None:
    failed = []

    def script(call: Call) -> Iterator[Any]:
        if not failed:
            failed.append(call)
            yield fake_triton.error("Request for unknown model: 'llm' has no available versions")
        else:
            yield from two_words(call)

    with fake_triton.serve(script) as server:
        assert use(server.url, lambda client: client.generate("Hi")).text == "Hello wörld"


def test_a_failed_connection_is_retried(use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[ClientError] = []
    delay = Retries.delay

    def counted(self: Retries, error: ClientError) -> float | None:
        asked.append(error)
        return delay(self, error)

    monkeypatch.setattr(Retries, "delay", counted)
    with fake_triton.serve(two_words) as server:
        url = server.url
    with pytest.raises(ConnectionFailed):
        use(url, lambda client: client.generate("Hi"), timeout=60)
    assert len(asked) == 3


def test_a_server_that_returns_is_found_by_the_next_attempt(
    use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC's own back-off between connections is shorter than that between attempts."""
    with fake_triton.serve(two_words) as server:
        port = int(server.url.split(":")[1])
    held = HeldPorts("127.0.0.1", (port,))
    failures: list[ClientError] = []
    with contextlib.ExitStack() as stack:

        def return_it(self: Retries, error: ClientError) -> float | None:
            failures.append(error)
            if len(failures) == 1:
                stack.enter_context(fake_triton.serve(two_words, port))
            return 0.3 if len(failures) < 3 else None

        monkeypatch.setattr(Retries, "delay", return_it)
        assert use(server.url, lambda client: client.generate("Hi")).text == "Hello wörld"
    held.release()


def test_probes_are_not_retried(use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "FIRST_DELAY_S", 60.0)
    with fake_triton.serve(two_words) as server:
        url = server.url
    started = time.monotonic()
    with pytest.raises(ConnectionFailed):
        use(url, lambda client: client.is_ready())
    assert time.monotonic() - started < 0.75 * 60.0


def test_the_servers_wait_is_kept(use: Use) -> None:
    script = failing(1, UNAVAILABLE, FULL, ("grpc-retry-pushback-ms", "400"))
    with fake_triton.serve(script) as server:
        started = time.monotonic()
        assert use(server.url, lambda client: client.generate("Hi")).text == "Hello wörld"
        assert time.monotonic() - started >= 0.4


def test_the_timeout_bounds_all_attempts_together(use: Use) -> None:
    """The second attempt has what is left of it."""
    script = failing(1, UNAVAILABLE, FULL, ("retry-after", "1"))

    def slow(call: Call) -> Iterator[Any]:
        for message in script(call):
            yield message
            call.ended.wait(fake_triton.WAIT_S)

    def attempt() -> float:
        with fake_triton.serve(slow) as server:
            started = time.monotonic()
            with pytest.raises(TimedOut, match="within the timeout of 2 s"):
                use(server.url, lambda client: client.generate("Hi"), timeout=2)
            return time.monotonic() - started

    found = [attempt()]
    while found[-1] >= 2.9 and len(found) < 5:  # as on a busy machine
        script = failing(1, UNAVAILABLE, FULL, ("retry-after", "1"))
        found.append(attempt())
    assert 1.9 < found[-1] < 2.9, found


def test_closing_a_stream_ends_the_wait_for_another_attempt() -> None:
    with (
        fake_triton.serve(failing(1, UNAVAILABLE, FULL, ("retry-after", "50"))) as server,
        Client(server.url) as client,
    ):
        stream = client.stream("Hi")

        def close_once_asked() -> None:
            wait_until(lambda: server.calls)
            time.sleep(0.2)
            stream.close()

        closer = threading.Thread(target=close_once_asked)
        closer.start()
        with pytest.raises(Cancelled, match="was closed"):
            next(stream)
        closer.join()
        assert list(stream) == []
        assert len(server.calls) == 1


def test_closing_an_async_stream_ends_the_wait_for_another_attempt() -> None:
    async def main(url: str) -> None:
        async with AsyncClient(url) as client:
            stream = client.stream("Hi")

            async def close_once_asked() -> None:
                while not server.calls:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.2)
                await stream.aclose()

            closer = asyncio.create_task(close_once_asked())
            with pytest.raises(Cancelled, match="was closed"):
                await anext(stream)
            await closer
            assert [delta async for delta in stream] == []

    with fake_triton.serve(failing(1, UNAVAILABLE, FULL, ("retry-after", "50"))) as server:
        asyncio.run(main(server.url))
        assert len(server.calls) == 1


def test_delays_grow_with_jitter_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "FIRST_DELAY_S", 0.5)
    attempts = Retries(6, None)
    delays = [attempts.delay(unavailable()) for _ in range(7)]
    assert delays.pop() is None
    for delay, longest in zip(delays, (0.5, 1.0, 2.0, 4.0, 8.0, 8.0), strict=True):
        assert delay is not None and longest * 0.75 <= delay <= longest
    again = Retries(6, None)
    assert [again.delay(unavailable()) for _ in range(6)] != delays


def test_the_servers_wait_replaces_a_shorter_delay_and_one_too_long_is_not_waited_for() -> None:
    assert Retries(1, None).delay(unavailable(7.0)) == 7.0
    assert Retries(1, None).delay(unavailable(61.0)) is None


def test_a_delay_beyond_the_deadline_is_not_waited_for() -> None:
    attempts = Retries(2, 5.0)
    attempts.start()
    assert attempts.delay(unavailable(6.0)) is None
    assert attempts.delay(unavailable(1.0)) == 1.0


@pytest.mark.parametrize("wrong", [-1, 101, True, 1.0, "2", None])
def test_a_number_of_retries_that_cannot_be_one_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"max_retries: is .*; allowed: 0 to 100"):
        Client(max_retries=wrong)
