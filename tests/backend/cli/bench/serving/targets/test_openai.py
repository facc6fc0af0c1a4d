"""OpenAI's API as a target."""

from __future__ import annotations

import asyncio
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fake_openai
from certificates import make
from fake_openai import DONE, event
from inflight.cli.bench.serving.targets.openai import OpenAITarget
from inflight.cli.bench.serving.targets.target import Arrival, Prompt
from inflight_client import (
    ClientError,
    ConnectionFailed,
    InvalidRequest,
    ServerError,
    TimedOut,
    Unavailable,
)
from waiting import PATIENCE_S


def usage(prompt: int, completion: int) -> dict[str, Any]:
    return {"usage": {"prompt_tokens": prompt, "completion_tokens": completion}}


def text(content: str, **rest: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": content, "finish_reason": None}], **rest}


def chat(**delta: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta}]}


def ask(
    target: OpenAITarget, prompt: str = "Hi", taken: threading.Semaphore | None = None
) -> list[Arrival]:
    """Args:
    taken: released once for each arrival.
    """

    async def run() -> list[Arrival]:
        found = []
        try:
            async for one in target.send(Prompt(prompt, 8)):
                found.append(one)
                if taken is not None:
                    taken.release()
        finally:
            await target.aclose()
        return found

    return asyncio.run(run())


def slowly(*events: bytes) -> fake_openai.Script:
    """Parts that the client may read one by one."""

    def script(body: dict[str, Any]) -> Iterator[bytes]:
        for one in events:
            time.sleep(0.02)
            yield one

    return script


def in_turn(taken: threading.Semaphore, *parts: bytes) -> fake_openai.Script:
    """Parts of which each is sent once the client has taken the one before it."""

    def script(body: dict[str, Any]) -> Iterator[bytes]:
        for number, part in enumerate(parts):
            assert not number or taken.acquire(timeout=PATIENCE_S)
            yield part

    return script


def totals(arrivals: list[Arrival]) -> tuple[int, int, int]:
    """Tokens of all responses, input tokens, reported output tokens."""
    return (
        sum(one.num_tokens for one in arrivals),
        max(one.num_input_tokens for one in arrivals),
        max(one.num_output_tokens for one in arrivals),
    )


def test_tokens_follow_from_the_usage_of_each_event() -> None:
    """An event may have several tokens, or none with text: half a character."""
    taken = threading.Semaphore(0)
    script = in_turn(
        taken,
        event(text("a", **usage(5, 1))),
        event(text("", **usage(5, 2))),
        event(text("bcd", **usage(5, 6))),
        event({"choices": [], **usage(5, 6)}) + DONE,
    )
    with fake_openai.serve(script) as server:
        found = ask(OpenAITarget(server.url, "fake-1"), taken=taken)
    assert [one.num_tokens for one in found if one.num_tokens] == [1, 1, 4]
    assert totals(found) == (6, 5, 6)
    assert [one.at for one in found] == sorted(one.at for one in found)


def test_without_usage_an_event_with_text_is_a_token_and_the_total_is_reported() -> None:
    script = slowly(
        event(chat(role="assistant", content="")),
        event(chat(reasoning_content="hm")),
        event(chat(content="a")),
        event({"choices": [], **usage(7, 5)}),
        DONE,
    )
    with fake_openai.serve(script) as server:
        assert totals(ask(OpenAITarget(server.url, "fake-1", is_chat=True))) == (2, 7, 5)


def test_events_that_arrive_together_are_one_arrival() -> None:
    taken = threading.Semaphore(0)
    script = in_turn(
        taken,
        event(text("a")) + event(text("b"))[:9],
        event(text("b"))[9:] + event(text("c")).replace(b"\n", b"\r\n") + DONE,
    )
    with fake_openai.serve(script) as server:
        found = ask(OpenAITarget(server.url, "m"), taken=taken)
    assert [one.num_tokens for one in found] == [1, 2]


@pytest.mark.parametrize("is_chat", [False, True])
def test_a_request_asks_for_an_exact_length_without_sampling(is_chat: bool) -> None:
    with fake_openai.serve(slowly(event(text("a")), DONE)) as server:
        ask(OpenAITarget(server.url, "fake-2", is_chat=is_chat, api_key="k1"), "Hello")
        ((path, headers, body),) = server.requests
    assert path == ("/v1/chat/completions" if is_chat else "/v1/completions")
    assert headers["Authorization"] == "Bearer k1"
    prompt = (
        {"messages": [{"role": "user", "content": "Hello"}]} if is_chat else {"prompt": "Hello"}
    )
    expected = {"model": "fake-2", "max_tokens": 8, "ignore_eos": True, "temperature": 0, **prompt}
    assert {name: body[name] for name in expected} == expected
    assert body["stream"] is body["stream_options"]["include_usage"] is True


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, InvalidRequest),
        (404, InvalidRequest),
        (429, Unavailable),
        (503, Unavailable),
        (500, ServerError),
    ],
)
def test_an_error_has_the_kind_of_its_status(status: int, kind: type[ClientError]) -> None:
    with fake_openai.serve(slowly(b'{"error": {"message": "max_tokens: too large"}}')) as server:
        server.status = status
        with pytest.raises(kind, match=f"HTTP {status}: max_tokens: too large") as caught:
            ask(OpenAITarget(server.url, "m"))
    assert type(caught.value) is kind


def test_an_error_in_a_stream_and_a_stream_without_its_end_are_errors_of_the_server() -> None:
    for events, error in (
        ((event(text("a")), event({"error": {"message": "the engine failed"}})), "engine failed"),
        ((event(text("a")),), "ended before its last event"),
        ((event(b"{"),), "cannot be read"),
    ):
        with (
            fake_openai.serve(slowly(*events)) as server,
            pytest.raises(ServerError, match=error),
        ):
            ask(OpenAITarget(server.url, "m"))


def test_a_request_ends_with_its_timeout() -> None:
    ended = threading.Event()

    def script(body: dict[str, Any]) -> Iterator[bytes]:
        yield event(text("a"))
        ended.wait(PATIENCE_S)

    with fake_openai.serve(script) as server:
        with pytest.raises(TimedOut, match=r"0\.2 s"):
            ask(OpenAITarget(server.url, "m", timeout_s=0.2))
        ended.set()


def test_no_server_is_a_lost_connection() -> None:
    with fake_openai.serve(slowly()) as server:
        url = server.url
    for call in (ask, describe):
        with pytest.raises(ConnectionFailed, match=url):
            call(OpenAITarget(url, "m"))


def describe(target: OpenAITarget) -> dict[str, str]:
    async def run() -> dict[str, str]:
        try:
            return await target.describe()
        finally:
            await target.aclose()

    return asyncio.run(run())


def test_the_first_model_is_the_default() -> None:
    with fake_openai.serve(slowly()) as server:
        found = describe(OpenAITarget(f"{server.url}/v1"))
        assert (found["model"], found["endpoint"]) == ("fake-1", "openai completions")
        assert describe(OpenAITarget(server.url, "fake-2", is_chat=True))["model"] == "fake-2"
        with pytest.raises(InvalidRequest, match="no model 'nope'; it has fake-1, fake-2"):
            describe(OpenAITarget(server.url, "nope"))


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:9000", "ftp://h:1", "http://h:99999", "http://h/?a"]
)
def test_another_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match="http://host:port"):
        OpenAITarget(url)


def test_a_missing_file_of_authorities_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="ca_file: /nowhere"):
        OpenAITarget("https://h:1", ca_file="/nowhere")


def test_https_trusts_the_given_authorities_only(tmp_path: Path) -> None:
    certificates = make(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.server.cert, certificates.server.key)
    with fake_openai.serve(slowly(event(text("a", **usage(3, 1))), DONE), context) as server:
        assert server.url.startswith("https://")
        assert totals(ask(OpenAITarget(server.url, "m", ca_file=str(certificates.ca))))[0] == 1
        with pytest.raises(ConnectionFailed):
            ask(OpenAITarget(server.url, "m"))
