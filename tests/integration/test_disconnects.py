"""A request whose client has left ends, whatever the transport, and without a stream as well."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from failpoint import failpoint
from kserve import Stream, ask, request, tensor, text
from supervised import Serving, serve, without_chat

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

STEP_MS = 20
MAX_TOKENS = 4000
# More than any client that leaves takes to be noticed, and half of what the output takes.
ENDS_S = MAX_TOKENS * STEP_MS / 2e3
CLIENTS = 100
PATIENCE_S = 1.0
ENDLESS = (tensor("ignore_eos", "BOOL", True), tensor("max_tokens", "INT32", MAX_TOKENS))


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with failpoint("slow", STEP_MS):
        folder = tmp_path_factory.mktemp("disconnects")
        with serve(
            folder, "echo", "--grpc-guard", prepare=without_chat, num_blocks=8192, max_num_seqs=128
        ) as found:
            yield found


def num_unfinished(serving: Serving) -> int:
    stats = serving.stats()
    return stats.num_running + stats.num_waiting + stats.num_suspended


def wait_until_idle(serving: Serving, timeout: float) -> None:
    serving.wait_until(lambda: num_unfinished(serving) == 0, timeout)
    stats = serving.stats()
    assert stats.num_free_blocks == stats.num_blocks


def give_up(serving: Serving, patience_s: float, model: str = "generate") -> None:
    """Ask for a long text over HTTP, and hang up before it is there."""
    host, _, port = serving.http.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=patience_s)
    prompt = {"text_input": "word " * 20} if model == "generate" else {"input_ids": [1, 2, 3]}
    body = {**prompt, "max_tokens": MAX_TOKENS, "ignore_eos": True}
    with contextlib.suppress(TimeoutError):
        connection.request("POST", f"/v2/models/{model}/generate", json.dumps(body))
        connection.getresponse()
        raise AssertionError("the response was not to be complete by now")
    connection.close()


@pytest.mark.parametrize("model", ["generate", "llm"])
def test_generate_ends_soon_after_its_client_has_left(serving: Serving, model: str) -> None:
    give_up(serving, 0.5, model)
    wait_until_idle(serving, ENDS_S)


@pytest.mark.parametrize("how", ["cancel", "hang_up"])
def test_a_grpc_request_ends_soon_after_its_client_has_left(serving: Serving, how: str) -> None:
    stream = Stream(serving.grpc, request("generate", text("word " * 20), *ENDLESS))
    serving.wait_until(lambda: num_unfinished(serving) == 1)
    getattr(stream, how)()
    wait_until_idle(serving, ENDS_S)


def test_only_the_requests_of_that_client_end(serving: Serving) -> None:
    tokens = tensor("max_tokens", "INT32", 60)
    with ThreadPoolExecutor(1) as pool:
        message = request("generate", text("one two three"), ENDLESS[0], tokens)
        other = pool.submit(ask, serving.grpc, message)
        give_up(serving, 0.5)
        (answer,) = other.result(60)
    assert (answer["num_output_tokens"], answer["finish_reason"]) == (60, "length")
    wait_until_idle(serving, ENDS_S)


def test_a_client_may_leave_before_its_request_has_begun(serving: Serving) -> None:
    for _ in range(10):
        give_up(serving, 0.001)
    time.sleep(0.1)
    wait_until_idle(serving, ENDS_S)


def test_a_hundred_clients_that_give_up_leave_an_idle_engine(serving: Serving) -> None:
    with ThreadPoolExecutor(CLIENTS) as pool:
        for one in [pool.submit(give_up, serving, PATIENCE_S) for _ in range(CLIENTS)]:
            one.result()
    wait_until_idle(serving, ENDS_S)
    assert serving.canary()
