"""The gateway as a process, in front of a Triton that plays scripts."""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import lasting_health
from http_door import LIMITS, TICKET
from inflight.deploy.ports import HeldPorts
from inflight.ipc.health import Health
from waiting import PATIENCE_S, wait_until

MODELS = [
    *("chat", "chat_tokenizer", "detokenizer", "generate", "llm", "tokenizer"),
    *("base_generate", "base_llm", "base_tokenizer"),  # without a chat template
    *("think_chat", "think_generate", "think_llm", "think_tokenizer"),
]
DESCRIPTION = {
    "model": "org/tiny-chat",
    "max_model_len": 512,
    "vocab_size": 100,
    "bos_token": "<s>",
    "eos_token": "</s>",
    "chat_template": "{{ tools }} <tool_call> </tool_call>",
    "special_tokens": ["<s>", "</s>"],
}
DESCRIPTIONS: dict[str, dict[str, Any]] = {
    "tokenizer": DESCRIPTION,
    "base_tokenizer": {"model": "base", "max_model_len": 64, "chat_template": None},
    "think_tokenizer": DESCRIPTION
    | {
        "model": "thinker",
        "chat_template": "{{ enable_thinking }} <think> </think> <tool_call> </tool_call>",
    },
}
UNTIL_LEFT = "until the client has left"
DROP = "close the connection"
Step = bytes | float | str | threading.Event | dict[str, Any]


def delta(text: str = "", **members: Any) -> dict[str, Any]:
    """A response of the ensemble."""
    found = {
        "model_name": "chat",
        "model_version": "1",
        "text_output": text,
        "index": 0,
        "finish_reason": "",
        "num_input_tokens": 5,
        "num_output_tokens": 1 if text else 0,
        "cumulative_logprob": -1.0,
        "logprobs": "",
        "prompt_logprobs": "",
        "draft_stats": "",
    }
    return found | members


def end(reason: str = "stop", **members: Any) -> dict[str, Any]:
    return delta(finish_reason=reason, **members)


def sse(value: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()


class ScriptedTriton(ThreadingHTTPServer):
    """Plays `script` as the response to each generate_stream.

    Attributes:
        script: bytes and responses are chunks of the body, numbers pauses in seconds. A
            threading.Event is a pause until it is set.
        refusal: status and error of the response instead; None for the script.
        requests: (model, body) of each, bodies without tickets.
        keys: the header Authorization of each.
        index_key: the one that a list of the models needs.
        num_lost: streams whose peer left before their end.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.script: Sequence[Step] = [delta("Hi"), end()]
        self.refusal: tuple[int, str] | None = None
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.num_lost = 0
        self.keys: list[str] = []
        self.index_key = ""

    def plays(self, *script: Step) -> None:
        self.script, self.refusal = script, None
        self.requests.clear()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A peer that has left is no error."""

    @property
    def sent(self) -> dict[str, Any]:
        """The body of the only request."""
        ((_, body),) = self.requests
        return body


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ScriptedTriton

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self, status: int, body: Any) -> None:
        payload = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self.answer(200, b"inflight_server_ready 1\n")
        else:
            self.answer(200 if self.path == "/v2/health/ready" else 404, {})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/v2/repository/index":
            if self.headers.get("Authorization", "") != self.server.index_key:
                return self.answer(401, {"error": "Authorization: no valid API key"})
            return self.answer(200, [{"name": name, "state": "READY"} for name in MODELS])
        model, route = self.path.split("/")[3], self.path.rpartition("/")[2]
        if route == "infer":
            return self.infer(model, json.loads(body))
        self.server.keys.append(self.headers.get("Authorization", ""))
        self.server.requests.append((model, json.loads(TICKET.sub(b"", body))))
        if self.server.refusal is not None:
            status, error = self.server.refusal
            return self.answer(status, {"error": error})
        with contextlib.suppress(OSError):
            self.play()

    def infer(self, model: str, request: dict[str, Any]) -> None:
        """A tokenizer whose tokens are code points."""
        inputs = {one["name"]: one["data"] for one in request["inputs"]}
        wanted = [one["name"] for one in request["outputs"]]
        values: dict[str, list[Any]] = {}
        if "describe" in inputs:
            values["description"] = [json.dumps(DESCRIPTIONS[model])]
        elif "detokenize_ids" in inputs:
            values["text_output"] = ["".join(map(chr, inputs["detokenize_ids"]))]
        else:
            (text,) = inputs.get("text_input") or inputs["messages"]
            values["input_ids"] = [ord(character) for character in text]
        outputs = [{"name": name, "data": values[name]} for name in wanted]
        return self.answer(200, {"outputs": outputs})

    def play(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for step in self.server.script:
            if isinstance(step, float):
                time.sleep(step)
            elif isinstance(step, threading.Event):
                step.wait(2 * PATIENCE_S)
            elif step == DROP:
                self.close_connection = True
                return
            elif step == UNTIL_LEFT:
                self.connection.settimeout(2 * PATIENCE_S)
                self.server.num_lost += not self.connection.recv(1)
                self.close_connection = True
                return
            else:
                self.chunk(sse(step) if isinstance(step, dict) else step)
        self.chunk(b"")

    def chunk(self, data: Any) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()


@dataclass
class Gateway:
    """A gateway, and the Triton behind it."""

    triton: ScriptedTriton
    process: subprocess.Popen[bytes]
    port: int
    health: Path
    models: list[str]
    is_ready: bool = True
    versions: dict[str, list[int]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def set_ready(self, is_ready: bool) -> None:
        self.is_ready = is_ready
        self.write()
        time.sleep(0.15)  # the gateway reads it ten times a second

    def write(self) -> None:
        found = Health(
            is_live=True, is_ready=self.is_ready, models=self.models, versions=self.versions
        )
        lasting_health.write(self.health, found)

    def ask(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            payload = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, payload, named)
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return response.status, found, response.read()
        finally:
            connection.close()

    def is_serving(self) -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException):
            return self.ask("GET", "/ready")[0] == 200
        return False

    def post(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        """To a route below /v1."""
        status, _, found = self.ask("POST", f"/v1/{path}", {"model": "llm", **body})
        return status, json.loads(found)

    def chat(self, **fields: Any) -> dict[str, Any]:
        """A chat that succeeds."""
        messages = [{"role": "user", "content": "Hello"}]
        status, found = self.post("chat/completions", **{"messages": messages, **fields})
        assert status == 200, found
        return found

    def complete(self, **fields: Any) -> dict[str, Any]:
        """A completion that succeeds."""
        status, found = self.post("completions", **{"prompt": "Hello", **fields})
        assert status == 200, found
        return found

    def stream(self, path: str = "chat/completions", **fields: Any) -> list[Any]:
        """The events of a stream, parsed but for the last, [DONE]."""
        prompt = {"messages": [{"role": "user", "content": "Hello"}], "prompt": "Hello"}
        key = "messages" if path.startswith("chat") else "prompt"
        body = {"model": "llm", key: prompt[key], "stream": True, **fields}
        status, headers, found = self.ask("POST", f"/v1/{path}", body)
        assert status == 200, found
        assert headers["content-type"].startswith("text/event-stream")
        return events(found)

    def error(self, path: str = "completions", **fields: Any) -> tuple[int, dict[str, Any]]:
        """Of a request that fails."""
        given = {"prompt": "Hello"} if path == "completions" else {}
        status, found = self.post(path, **{**given, **fields})
        assert set(found["error"]) == {"message", "type", "param", "code"}
        return status, found["error"]


def events(body: bytes) -> list[Any]:
    """Server-sent events with data; comments are left out."""
    assert body.endswith(b"\n\n")
    parts = [part for part in body.decode().split("\n\n")[:-1] if not part.startswith(":")]
    assert all(part.startswith("data: ") and "\n" not in part for part in parts)
    texts = [part.removeprefix("data: ") for part in parts]
    return [text if text == "[DONE]" else json.loads(text) for text in texts]


@contextlib.contextmanager
def a_gateway(
    folder: Path,
    *options: str,
    models: list[str] = MODELS,
    is_supervised: bool = True,
    limits: dict[str, Any] = LIMITS,
) -> Iterator[Gateway]:
    """Args:
    limits: of the gateway, for its clients.
    is_supervised: it reads the health file; otherwise it asks Triton.
    """
    triton = ScriptedTriton()
    threading.Thread(target=triton.serve_forever, args=(0.05,), daemon=True).start()
    held = HeldPorts("127.0.0.1", (0,))
    port = held.numbers[0]
    health = folder / "health.json"
    lasting_health.write(health, Health(is_live=True, is_ready=True, models=models))
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "inflight.door.gateway_door"),
            *("--listen", f"127.0.0.1:{port}", "--limits", json.dumps(limits)),
            *("--upstream", f"127.0.0.1:{triton.server_address[1]}"),
            *(("--health", str(health)) if is_supervised else ()),
            *(option.format(triton=triton.server_address[1]) for option in options),
        ]
    )
    running = Gateway(triton, process, port, health, models)
    try:
        wait_until(lambda: process.poll() is not None or running.is_serving())
        yield running
    finally:
        process.kill()
        process.wait()
        held.release()
        triton.shutdown()
        triton.server_close()


def named_events(body: bytes) -> list[dict[str, Any]]:
    """Server-sent events whose names are the types of their data."""
    assert body.endswith(b"\n\n")
    found = []
    for part in body.decode().split("\n\n")[:-1]:
        if part.startswith(":"):
            continue
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found
