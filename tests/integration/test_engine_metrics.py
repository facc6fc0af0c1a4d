"""The supervisor's metrics endpoint shows all engines and outlives tritonserver."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from inflight.deploy.server_families import SERVER_FAMILIES
from inflight.engine.metrics.families import published
from supervised import Serving, serve

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

SECRET = "The password is xyzzy."


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    options = ("--grpc-guard", "--metrics-compat", "vllm", "--busy-poll", "5")
    with serve(tmp_path_factory.mktemp("metrics"), "echo", *options) as serving:
        yield serving


def scrape(serving: Serving) -> str:
    with urllib.request.urlopen(serving.engine_metrics, timeout=60) as response:
        return str(response.read().decode())


def value(shown: str, name: str, **labels: str) -> float:
    """The sum of the series of a name with these labels."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(shown)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def generate(serving: Serving, prompt: str) -> int:
    connection = http.client.HTTPConnection(serving.http, timeout=60)
    try:
        body = json.dumps({"text_input": prompt, "max_tokens": 20, "ignore_eos": True})
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v2/models/generate/generate", body, headers)
        return connection.getresponse().status
    finally:
        connection.close()


def test_all_families_are_shown_without_any_text_of_a_request(server: Serving) -> None:
    before = scrape(server)
    assert generate(server, SECRET) == 200
    assert server.canary()
    shown = scrape(server)
    names = {
        sample.name for family in text_string_to_metric_families(shown) for sample in family.samples
    }
    of_gpu = {one.name for one in SERVER_FAMILIES if one.stem.startswith("gpu_")}
    own = {one.name for one in SERVER_FAMILIES} - of_gpu
    assert set(published(["vllm"])) | own <= names
    assert not of_gpu & names, "the echo engine uses none"
    assert value(shown, "inflight_server_ready") == 1
    tokens = "inflight_generation_tokens_total"
    assert value(shown, tokens, model="llm") == server.stats().num_output_tokens
    assert value(shown, tokens, model="llm") >= value(before, tokens, model="llm") + 20
    assert value(shown, "inflight_door_requests_total", door="http", status="200") == 1
    assert value(shown, "inflight_door_requests_total", door="grpc", status="OK") == 1
    assert "xyzzy" not in shown


def test_it_answers_while_tritonserver_is_replaced(server: Serving) -> None:
    canary = server.canary()
    before = scrape(server)
    not_ready: list[str] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            shown = scrape(server)
            if not value(shown, "inflight_server_ready"):
                not_ready.append(shown)
            time.sleep(0.02)

    watching = threading.Thread(target=watch)
    watching.start()
    os.kill(server.pid_of("tritonserver"), signal.SIGKILL)
    server.wait_until_serving(canary)
    server.wait_until(lambda: server.health()[0] == 200)
    stop.set()
    watching.join(60)
    assert not_ready, "it answered while the server was not ready"
    tokens = [value(shown, "inflight_generation_tokens_total") for shown in (before, not_ready[0])]
    assert tokens[0] == tokens[1] > 0
    assert value(not_ready[0], "inflight_engine_up", model="llm") == 1
    after = scrape(server)
    restarts = "inflight_process_restarts_total"
    assert value(after, restarts, process="tritonserver") == 1
    assert value(after, restarts, process="engine of llm") == 0
    assert value(after, "inflight_server_not_ready_seconds_total") > 0
    assert value(after, "inflight_generation_tokens_total") > tokens[0]


def test_the_http_door_polls_as_long_as_it_is_set_to(server: Serving) -> None:
    command = psutil.Process(server.pid_of("http")).cmdline()
    assert float(command[command.index("--busy-poll") + 1]) == 5.0
    assert generate(server, SECRET) == 200
