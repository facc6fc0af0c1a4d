"""`inflight gateway`."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from typing import Any

import pytest

from gateway import ScriptedTriton, delta, end
from inflight.cli import gateway as module
from inflight.cli.gateway import run
from inflight.cli.options import GatewayProcess
from inflight.errors import ConfigError
from waiting import PATIENCE_S, wait_until


def test_it_serves_in_front_of_servers_until_ctrl_c() -> None:
    tritons = [ScriptedTriton() for _ in range(2)]
    for triton in tritons:
        triton.index_key = "Bearer own"
        triton.plays(delta("Hi"), end())
        threading.Thread(target=triton.serve_forever, args=(0.05,), daemon=True).start()
    named = [f"--triton=127.0.0.1:{triton.server_address[1]}" for triton in tritons]
    command = [sys.executable, "-m", "inflight.cli.app", "gateway", "--port", "0", *named]
    environment = os.environ | {"INFLIGHT_API_KEY": "own"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stderr is not None
        match = re.fullmatch(r"OpenAI\s+(http://127.0.0.1:\d+/v1)\n", process.stderr.readline())
        assert match is not None
        headers = {"Authorization": "Bearer client"}
        body = json.dumps({"model": "llm", "prompt": "x"}).encode()
        request = urllib.request.Request(f"{match[1]}/completions", body, headers)

        def answer() -> dict[str, Any] | None:
            try:
                with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
                    found: dict[str, Any] = json.load(response)
                    return found
            except OSError:  # it does not listen at once
                assert process.poll() is None
                return None

        found = wait_until(answer)
        assert found is not None and found["choices"][0]["text"] == "Hi"
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.communicate()
        for triton in tritons:
            triton.shutdown()
            triton.server_close()
    assert [key for triton in tritons for key in triton.keys] == ["Bearer client"]


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="--triton: 'x' is not an address; allowed: HOST:PORT"):
        run(["x"], GatewayProcess())


def test_a_port_that_is_taken_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port: 127.0.0.1:{port} cannot be used"):
            run(["127.0.0.1:8000"], GatewayProcess(port=port))


@pytest.mark.parametrize(
    ("host", "page", "serves"),
    [
        ("127.0.0.1", None, True),
        ("localhost", None, True),
        ("0.0.0.0", None, False),
        ("0.0.0.0", True, True),
        ("127.0.0.1", False, False),
    ],
)
def test_beyond_loopback_the_page_is_served_on_request(
    host: str,
    page: bool | None,
    serves: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(module.gateway_door, "main", lambda words: given.extend(words) or 0)
    assert run(["127.0.0.1:1"], GatewayProcess(port=0, host=host, page=page)) == 0
    assert ("--page" in given) == serves
    assert (f"chat     http://{host}:" in capsys.readouterr().err) == serves
