"""The HTTP door in front of a real tritonserver: what crashes a bare one is refused, and all other
requests are served as without a door."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton_http

import lasting_health
from inflight.deploy.ports import HeldPorts
from inflight.ipc.health import Health
from kserve import generate, generate_stream, post
from serving import Triton
from waiting import wait_until

pytestmark = pytest.mark.integration

PROMPT = "The canary sings of rivers."
ENDLESS = {"text_input": "x " * 50, "stream": True, "ignore_eos": True, "max_tokens": 8000}


@dataclass
class Guarded:
    """A tritonserver behind a door at host:port."""

    triton: Triton
    http: str
    health: Path

    def connect(self) -> socket.socket:
        host, port = self.http.split(":")
        return socket.create_connection((host, int(port)), timeout=60)

    def post(self, path: str, body: bytes, **headers: str) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection(self.http, timeout=60)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request("POST", path, body, named)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()


@pytest.fixture(scope="module")
def guarded(echo: Triton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    health = tmp_path_factory.mktemp("door") / "health.json"
    held = HeldPorts("127.0.0.1", (0,))
    port = held.numbers[0]
    models = echo.server.models()
    lasting_health.write(health, Health(is_live=True, is_ready=True, models=models))
    command = [sys.executable, "-m", "inflight.door.http_door", "--health", str(health)]
    addresses = ["--listen", f"127.0.0.1:{port}", "--upstream", echo.http]
    process = subprocess.Popen([*command, *addresses])
    running = Guarded(echo, f"127.0.0.1:{port}", health)

    def listens() -> bool:
        with contextlib.suppress(OSError), running.connect():
            return True
        return False

    wait_until(listens)
    yield running
    process.terminate()
    assert process.wait(60) == 0
    held.release()


@pytest.fixture(autouse=True)
def the_server_lives(guarded: Guarded) -> Iterator[None]:
    yield
    assert guarded.triton.server.is_running()
    assert generate(guarded.http, "generate", text_input=PROMPT)["text_output"] == PROMPT
    guarded.triton.wait_until_idle()


def test_requests_are_served_as_without_a_door(guarded: Guarded) -> None:
    inputs = {"text_input": PROMPT, "max_tokens": 100, "stop_words": ["rivers"], "seed": 2**64 - 1}
    assert generate(guarded.http, "generate", **inputs) == generate(
        guarded.triton.http, "generate", **inputs
    )
    events = generate_stream(guarded.http, "generate", text_input=PROMPT)
    assert "".join(event["text_output"] for event in events) == PROMPT


def test_chat_is_served(guarded: Guarded) -> None:
    messages = json.dumps([{"role": "user", "content": "Hello!"}])
    answer = generate(guarded.http, "chat", messages=messages, max_tokens=60, ignore_eos=True)
    assert "Hello!" in answer["text_output"]


def test_options_may_stand_in_parameters(guarded: Guarded) -> None:
    inputs = {"text_input": "a b c", "parameters": {"max_tokens": 1}}
    assert generate(guarded.http, "generate", **inputs)["num_output_tokens"] == 1


@pytest.mark.parametrize("is_binary", [True, False])
def test_nvidias_client_is_served(guarded: Guarded, is_binary: bool) -> None:
    with triton_http.InferenceServerClient(guarded.http) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("generate")
        assert client.get_server_metadata()["name"] == "triton"
        assert client.get_model_metadata("tokenizer")["name"] == "tokenizer"
        assert client.get_model_config("tokenizer")["name"] == "tokenizer"
        assert client.get_inference_statistics("tokenizer")["model_stats"]
        assert len(client.get_model_repository_index()) == 6
        prompt = triton_http.InferInput("text_input", [1], "BYTES")
        prompt.set_data_from_numpy(np.array([PROMPT.encode()], object), binary_data=is_binary)
        wanted = [triton_http.InferRequestedOutput("input_ids", binary_data=is_binary)]
        found = client.infer("tokenizer", [prompt], outputs=wanted, request_id="7")
        assert found.get_response()["id"] == "7"
        ids = found.as_numpy("input_ids")
        assert ids is not None and len(ids) > 3
        with pytest.raises(triton_http.InferenceServerException, match="closed"):
            client.register_system_shared_memory("r", "/triton_python_backend_shm", 64)


def tensor(**fields: Any) -> bytes:
    prompt = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["x"], **fields}
    return json.dumps({"inputs": [prompt]}).encode()


def output(**parameters: Any) -> bytes:
    body = json.loads(tensor())
    body["outputs"] = [{"name": "prompt_tensor", "parameters": parameters}]
    return json.dumps(body).encode()


TOKENIZER = "/v2/models/tokenizer/infer"
# case -> path, body, status. On a bare tritonserver 2.51, most of these crash it or hurt others.
CRASHES = {
    "01-empty": (TOKENIZER, b"", 400),
    "03-nested-200k": (TOKENIZER, b"[" * 200_000, 400),
    "03-nested-in-data": (TOKENIZER, tensor(data=None).replace(b"null", b"[" * 10**6), 400),
    "34-dim-2-40": (TOKENIZER, tensor(shape=[2**40]), 400),
    "46-shared-memory": (TOKENIZER, output(shared_memory_region="triton_python_backend_shm"), 400),
    "48-classification": (TOKENIZER, output(classification=1), 400),
    "48-classification-2-31": (TOKENIZER, output(classification=2**31), 400),
    "42-2-40": (
        "/v2/models/generate/generate",
        json.dumps({"text_input": "x", "max_tokens": 2**40}).encode(),
        400,
    ),
}


@pytest.mark.parametrize("case", CRASHES)
def test_crash_http(guarded: Guarded, case: str) -> None:
    path, body, expected = CRASHES[case]
    status, reply = guarded.post(path, body)
    assert status == expected
    assert reply["error"]


def test_a_flood_of_chunks_is_refused(guarded: Guarded) -> None:
    """Case 8: two million chunks of one byte crashed a bare server, or took 2 GB."""
    with guarded.connect() as sock:
        sock.sendall(b"POST " + TOKENIZER.encode() + b" HTTP/1.1\r\nHost: x\r\n")
        sock.sendall(b"Transfer-Encoding: chunked\r\n\r\n")
        with contextlib.suppress(OSError):
            for _ in range(500):
                sock.sendall(b"1\r\nx\r\n" * 10_000)


def test_a_form_of_140_mb_is_refused(guarded: Guarded) -> None:
    with guarded.connect() as sock:
        sock.sendall(
            b"POST " + TOKENIZER.encode() + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 140000000\r\n"
            b"Content-Type: application/x-www-form-urlencoded\r\n\r\n"
        )
        assert b" 413 " in sock.recv(1000)


@pytest.mark.parametrize(
    ("inputs", "status"),
    [
        ({}, 400),
        ({"text_input": ""}, 400),
        ({"text_input": "x", "temprature": 1}, 400),
        ({"text_input": ["a", "b"]}, 400),
        ({"text_input": []}, 400),
        ({"text_input": "x", "max_tokens": 0}, 400),
        ({"text_input": "x", "temperature": "hot"}, 400),
        ({"text_input": "x", "stream": "yes"}, 400),
    ],
)
def test_a_bad_request_is_the_clients_fault(
    guarded: Guarded, inputs: dict[str, Any], status: int
) -> None:
    found, reply = post(guarded.http, "generate", "generate", inputs)
    assert found == status, reply


def test_a_second_response_to_generate_is_an_error(guarded: Guarded) -> None:
    """A bare tritonserver answers with an error and the status 200."""
    inputs = {"text_input": "a " * 3000, "stream": True, "ignore_eos": True, "max_tokens": 4000}
    status, reply = post(guarded.http, "generate", "generate", inputs)
    assert status == 400
    assert "error" in json.loads(reply)


def test_an_unknown_model_is_404_and_a_streaming_model_is_not_inferred(guarded: Guarded) -> None:
    assert post(guarded.http, "nothing", "generate", {"text_input": "x"})[0] == 404
    status, reply = post(guarded.http, "generate", "infer", tensor().decode())
    assert status == 501
    assert "generate_stream" in reply


@pytest.mark.parametrize("route", ["generate", "generate_stream"])
def test_a_client_that_leaves_ends_its_request(guarded: Guarded, route: str) -> None:
    body = json.dumps({**ENDLESS, "stream": route == "generate_stream"}).encode()
    with guarded.connect() as sock:
        sock.sendall(
            f"POST /v2/models/generate/{route} HTTP/1.1\r\nHost: x\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        if route == "generate_stream":
            assert sock.recv(100).startswith(b"HTTP/1.1 200")
    guarded.triton.wait_until_idle()


def test_many_streams_at_the_same_time_are_whole(guarded: Guarded) -> None:
    texts = [f"Stream {i} sings. " * 20 for i in range(16)]
    found: dict[int, str] = {}

    def run(index: int) -> None:
        events = generate_stream(guarded.http, "generate", text_input=texts[index], max_tokens=8000)
        found[index] = "".join(event["text_output"] for event in events)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[index] for index in range(len(texts))] == texts
