"""`inflight serve` with the small model, for clients in an environment without inflight."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

START_S = 120.0
MODEL = "SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class Server:
    """Addresses of `inflight serve`.

    Attributes:
        http, grpc: host:port of the models.
        url: of the gateway, without /v1.
    """

    http: str
    grpc: str
    url: str


@pytest.fixture(scope="session")
def native(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With the gateway, and a model that answers /infer."""
    with _serve(tmp_path_factory.mktemp("native"), "--unary", "--gateway-port", "0") as found:
        yield found


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--layout", "vllm", "--no-gateway")
    with _serve(tmp_path_factory.mktemp("vllm"), *options) as found:
        yield found


@pytest.fixture(scope="session")
def tensorrtllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--layout", "tensorrtllm", "--no-gateway")
    with _serve(tmp_path_factory.mktemp("tensorrtllm"), *options) as found:
        yield found


@pytest.fixture(scope="session")
def url(native: Server) -> str:
    """Of the gateway, without /v1."""
    return native.url


@pytest.fixture(scope="session")
def model() -> str:
    return MODEL


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's tokenizer as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("tokenizer") / "tokenizer"
    subprocess.run([os.environ["INFLIGHT"], "tokenizer", "export", str(folder)], check=True)
    return folder


@contextlib.contextmanager
def _serve(folder: Path, *options: str) -> Iterator[Server]:
    """Run the command in the variable INFLIGHT, on free ports."""
    shown = folder / "shown"
    with open(shown, "wb") as output:
        process = subprocess.Popen(
            [
                *(os.environ["INFLIGHT"], "serve", "--log-file", str(folder / "log")),
                *("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"),
                *("--engine-metrics-port", "0", *options),
            ],
            stdout=output,
            stderr=output,
            env={**os.environ, "COLUMNS": "1000"},
        )
    try:
        deadline = time.monotonic() + START_S
        while "Ctrl-C drains and stops\n" not in shown.read_text():  # the last line
            assert process.poll() is None and time.monotonic() < deadline, shown.read_text()
            time.sleep(0.1)
        yield Server(*(_address(kind, shown.read_text()) for kind in ("HTTP", "gRPC", "OpenAI")))
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _address(kind: str, shown: str) -> str:
    """From the table that `serve` prints; empty if it does not serve this."""
    pattern = (
        r"OpenAI\s+(http://\S+)/v1" if kind == "OpenAI" else rf"{kind}\s+(?:http://)?(\S+:\d+)"
    )
    match = re.search(pattern, shown)
    return "" if match is None else match[1]
