"""OpenAI's API over HTTP: `completions` or `chat/completions`, as server-sent events."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from inflight.cli.bench.serving.targets.target import Arrival, Prompt
from inflight.door.http.upstream import Exchange, Upstream, UpstreamLost
from inflight_client import (
    ClientError,
    ConnectionFailed,
    InvalidRequest,
    ServerError,
    TimedOut,
    Unavailable,
)

_URL = re.compile(
    r"(https?)://(\[[0-9a-fA-F:.]+\]|[^\s/:\[\]]+)(?::([0-9]{1,5}))?((?:/[^\s?#]*)?)", re.IGNORECASE
)
_PORTS = {"http": 80, "https": 443}
_EVENT_END = re.compile(rb"\r?\n\r?\n")
_DONE = b"[DONE]"


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class OpenAITarget:
    """
    Args:
        url: `http://host:port`, with or without `/v1`; `https` too.
        model: its name; "" for the first one that the server lists.
        is_chat: `chat/completions` instead of `completions`.
        api_key: of the server; None for none.
        ca_file: with https, trust the authorities of this PEM file instead of the system's.
        timeout_s: for each request as a whole; None for no limit.

    Raises:
        InvalidRequest: the url or the file is not valid.
    """

    def __init__(
        self,
        url: str,
        model: str = "",
        *,
        is_chat: bool = False,
        api_key: str | None = None,
        ca_file: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        found = _URL.fullmatch(url)
        if found is None or not 1 <= int(found[3] or 1) <= 65535:
            raise InvalidRequest(
                f"url: {url!r} is not valid; allowed: http://host:port or https://host:port"
            )
        scheme = found[1].lower()
        host = found[2].strip("[]")
        tls = _tls(ca_file) if scheme == "https" else None
        self._upstream = Upstream(host, int(found[3] or _PORTS[scheme]), tls)
        self._base = found[4].rstrip("/") or "/v1"
        self.url = url
        self._model = model
        self._is_chat = is_chat
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    async def send(self, prompt: Prompt) -> AsyncGenerator[Arrival, None]:
        """See `Target.send`."""
        path = f"{self._base}/chat/completions" if self._is_chat else f"{self._base}/completions"
        body = json.dumps(self._body(prompt)).encode()
        counter = _Counter()
        try:
            async with asyncio.timeout(self._timeout_s):
                exchange = await self._upstream.connect()
                try:
                    await exchange.send("POST", path, self._headers, body)
                    if exchange.status != 200:
                        raise _refusal(exchange.status, await exchange.read_all())
                    async for events in _events(exchange):
                        yield counter.arrival(time.perf_counter(), events)
                finally:
                    exchange.finish()
        except UpstreamLost:
            raise ConnectionFailed(f"the connection was lost or refused (url is {self.url})") from (
                None
            )
        except TimeoutError:
            raise TimedOut(
                f"no complete response within the timeout of {self._timeout_s:g} s"
            ) from None
        if not counter.is_done:
            raise ServerError("the stream ended before its last event")

    async def describe(self) -> dict[str, str]:
        """See `Target.describe`."""
        try:
            exchange = await self._upstream.connect()
            try:
                await exchange.send("GET", f"{self._base}/models", self._headers)
                body = await exchange.read_all()
            finally:
                exchange.finish()
        except UpstreamLost:
            raise ConnectionFailed(f"no server responds (url is {self.url})") from None
        if exchange.status != 200:
            raise _refusal(exchange.status, body)
        try:
            names = [str(one["id"]) for one in json.loads(body)["data"]]
        except (ValueError, KeyError, TypeError):
            raise ServerError(f"{self._base}/models is not a list of models") from None
        if not self._model and names:
            self._model = names[0]
        if self._model not in names:
            raise InvalidRequest(
                f"--model: the server has no model {self._model!r}; it has {', '.join(names)}"
            )
        route = "chat/completions" if self._is_chat else "completions"
        found = {"endpoint": f"openai {route}", "url": self.url, "model": self._model}
        if "server" in exchange.headers:
            found["server"] = exchange.headers["server"]
        return found

    async def aclose(self) -> None:
        self._upstream.close()
        await asyncio.sleep(0)  # transports close with the loop's next iteration

    def _body(self, prompt: Prompt) -> dict[str, Any]:
        content: dict[str, Any] = (
            {"messages": [{"role": "user", "content": prompt.text}]}
            if self._is_chat
            else {"prompt": prompt.text}
        )
        return {
            "model": self._model,
            **content,
            "max_tokens": prompt.output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }


class _Counter:
    """Counts the tokens of a stream's events.

    With `continuous_usage_stats`, an extension of vLLM, each event has the number of tokens so far;
    otherwise an event with text counts as one token, and the last one has the total.
    """

    def __init__(self) -> None:
        self.is_done = False
        self._num_reported = 0

    def arrival(self, at: float, events: list[bytes]) -> Arrival:
        """Of events that were read together.

        Raises:
            ServerError: an event is an error, or not JSON.
        """
        num_tokens = num_input = total = 0
        for event in events:
            if event == _DONE:
                self.is_done = True
                continue
            chunk = _chunk(event)
            usage = chunk.usage
            if usage is not None:
                num_input = usage.prompt_tokens
            if usage is not None and chunk.choices:
                num_tokens += max(0, usage.completion_tokens - self._num_reported)
                self._num_reported = usage.completion_tokens
            elif usage is not None:
                total = usage.completion_tokens
            else:
                num_tokens += any(map(_has_text, chunk.choices))
        return Arrival(at, num_tokens, num_input, total)


def _has_text(choice: _Choice) -> bool:
    delta = choice.delta
    if delta is not None:
        return bool(delta.content or delta.reasoning_content or delta.reasoning)
    return bool(choice.text)


def _chunk(event: bytes) -> _Chunk:
    try:
        chunk = msgspec.json.decode(event, type=_Chunk)
    except msgspec.DecodeError as error:
        raise ServerError(f"an event of the stream cannot be read: {error}") from None
    if chunk.error is not None:
        raise ServerError(_message(chunk.error))
    return chunk


async def _events(exchange: Exchange) -> AsyncGenerator[list[bytes], None]:
    """The data of the events that each read completes."""
    rest = b""
    while part := await exchange.read():
        *ended, rest = _EVENT_END.split(rest + part)
        found = [data for block in ended if (data := _data(block))]
        if found:
            yield found


def _data(block: bytes) -> bytes:
    lines = (line for line in block.splitlines() if line.startswith(b"data:"))
    return b"\n".join(line[5:].strip() for line in lines)


def _refusal(status: int, body: bytes) -> ClientError:
    try:
        found = json.loads(body)
    except ValueError:
        found = body.decode("utf-8", "replace")[:500]
    text = f"HTTP {status}: {_message(found)}"
    if status in (429, 503):
        return Unavailable(text)
    return InvalidRequest(text) if 400 <= status < 500 else ServerError(text)


def _message(found: Any) -> str:
    """The text of an error, in OpenAI's form or any other."""
    while isinstance(found, dict):
        found = found.get("error") or found.get("message") or json.dumps(found)
    return str(found)


def _tls(ca_file: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise InvalidRequest(f"ca_file: {ca_file}: {error}") from None
