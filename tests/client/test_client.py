"""The client against a fake server in this process."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import fake_triton
import inflight_client
from fake_triton import Call, answer, two_words
from inflight_client import Client, Completion, InvalidRequest


def test_generate_joins_the_deltas_and_adds_up_the_tokens() -> None:
    with fake_triton.serve(two_words) as server, Client(server.url) as client:
        assert client.generate("Hi") == Completion("Hello wörld", "stop", 5, 5)


def test_a_chat_travels_as_json_to_the_chat_model() -> None:
    messages: list[inflight_client.Message] = [{"role": "user", "content": 'Say "é"'}]
    with fake_triton.serve(two_words) as server, Client(server.url) as client:
        assert client.chat(messages).text == "Hello wörld"
        assert "".join(delta.text for delta in client.chat_stream(messages)) == "Hello wörld"
        whole, streamed = server.calls
    assert whole.request.model_name == streamed.request.model_name == "chat"
    datatype, shape, raw = whole.input("messages")
    assert (datatype, shape, json.loads(raw[4:])) == ("BYTES", [1], messages)
    assert whole.input("stream")[2] == b"\0"
    assert streamed.input("stream")[2] == b"\1"


def test_several_outputs_in_one_response_come_in_their_order() -> None:
    def both(call: Call) -> Iterator[Any]:
        yield fake_triton.answers([(0, "eins", "stop", 2, ""), (1, "zwei", "length", 7, "")])

    with fake_triton.serve(both) as server, Client(server.url) as client:
        found = client.generate_several("Hi", n=2, best_of=3, speculation="auto")
        client.generate_several("Hi", n=2, beam_width=4, length_penalty=0.5, early_stopping=True)
        call, search = server.calls
    assert found == [Completion("eins", "stop", 5, 2), Completion("zwei", "length", 5, 7)]
    assert call.input("n") == ("INT32", [1], struct.pack("<i", 2))
    assert call.input("best_of") == ("INT32", [1], struct.pack("<i", 3))
    assert call.input("speculation") == ("BYTES", [1], b"\4\0\0\0auto")
    assert search.input("beam_width") == ("INT32", [1], struct.pack("<i", 4))
    assert search.input("length_penalty") == ("FP32", [1], struct.pack("<f", 0.5))
    assert search.input("early_stopping") == ("BOOL", [1], b"\1")


def test_threads_may_share_a_client() -> None:
    def script(call: Call) -> Iterator[Any]:
        yield answer(call.input("text_input")[2][4:].decode(), "stop")

    texts: dict[int, str] = {}
    with fake_triton.serve(script) as server, Client(server.url) as client:

        def ask(number: int) -> None:
            texts[number] = client.generate(f"number {number}").text

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert texts == {number: f"number {number}" for number in range(6)}


def test_the_public_names_are_a_list_without_surprises() -> None:
    assert inflight_client.__all__ == sorted(inflight_client.__all__)
    assert all(hasattr(inflight_client, name) for name in inflight_client.__all__)


def test_a_version_is_sent_with_each_request() -> None:
    for version, sent in ((None, ""), (0, "0"), (12, "12")):
        with (
            fake_triton.serve(two_words) as server,
            Client(server.url, version=version) as client,
        ):
            client.generate("Hi")
            client.chat([{"role": "user", "content": "Hi"}])
            assert client.is_model_ready("chat")
        assert [call.request.model_version for call in server.calls] == [sent, sent]
    for wrong in (-1, True, "1"):
        with pytest.raises(InvalidRequest, match=r"version: is .*; allowed: 0 or more, or None"):
            Client(version=wrong)  # type: ignore[arg-type]


def test_importing_the_client_stays_light() -> None:
    """It takes less time of the processor than gRPC and numpy, which it needs."""
    program = (
        "import sys, time\n"
        "started = time.process_time()\n"
        "import grpc, numpy\n"
        "imported = time.process_time()\n"
        "import inflight_client\n"
        "heavy = {'torch', 'transformers', 'inflight', 'aiohttp'} & set(sys.modules)\n"
        "print((time.process_time() - imported) / (imported - started), *heavy)"
    )
    shares = []
    while not shares or (shares[-1] >= 1.0 and len(shares) < 5):
        found = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        ).stdout.split()
        assert len(found) == 1, found
        shares.append(float(found[0]))
    assert shares[-1] < 1.0, shares
