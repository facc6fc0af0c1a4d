"""A request of a disconnected client ends within two steps and releases its blocks, however the
engine detects it. Steps take the time of a model's, without a model that computes."""

import contextlib
import functools
import http.client
import json
import threading

import pytest

from failpoint import failpoint
from kserve import Stream, ask, request, tensor, text
from serving import serve

pytestmark = pytest.mark.integration

ENDLESS = (
    tensor("stream", "BOOL", True),
    tensor("ignore_eos", "BOOL", True),
    tensor("max_tokens", "INT32", 8000),
)
DIRECT = request("llm", tensor("input_ids", "INT32", [504, 3575, 282]), *ENDLESS)
ENSEMBLE = request("generate", text("The capital of"), *ENDLESS)
# Two steps, the one that is running when the client leaves, and one for a slow machine's scheduler.
MAX_STEPS = 4
# A machine that is busy for longer than that delays some cancels, but not each of so many.
NUM_ATTEMPTS = 5
STEP_MS = 40


@pytest.fixture(scope="module", autouse=True)
def _slow_steps():
    with failpoint("slow", STEP_MS):
        yield


@pytest.fixture(scope="module")
def server(_slow_steps, tmp_path_factory):
    yield from serve(tmp_path_factory.mktemp("cancel"), "echo")


@pytest.fixture(autouse=True)
def the_canary_sings(server):
    before = server.canary()
    server.wait_until_idle()
    yield
    assert server.canary() == before
    server.wait_until_idle()


def started(server, message, num_responses=3):
    stream = Stream(server.grpc, message)
    for _ in range(num_responses):
        stream.next()
    assert server.stats().num_running >= 1
    return stream


def over_http(server, model, **inputs):
    """An open generate_stream of which some events were read."""
    connection = http.client.HTTPConnection(server.http, timeout=60)
    body = json.dumps({"stream": True, "ignore_eos": True, "max_tokens": 8000, **inputs})
    connection.request("POST", f"/v2/models/{model}/generate_stream", body)
    response = connection.getresponse()
    for _ in range(3):
        assert response.readline().startswith(b"data: ")
        response.readline()
    assert server.stats().num_running >= 1
    return connection, response


def close(connection, response):
    response.close()
    connection.close()


def fewest_steps(server, begin, max_steps=MAX_STEPS):
    """Between a client's leaving and idleness, the least of some attempts.

    Args:
        begin: sends requests; returns what makes their client leave.
        max_steps: ends the attempts.
    """
    found = []
    while not found or (found[-1] > max_steps and len(found) < NUM_ATTEMPTS):
        leave = begin()
        before = server.stats().num_steps
        leave()
        server.wait_until_idle()
        found.append(server.stats().num_steps - before)
    return min(found)


@pytest.mark.parametrize("message", [DIRECT, ENSEMBLE], ids=["llm", "ensemble"])
@pytest.mark.parametrize("how", ["cancel", "hang_up"])
def test_a_lost_client_frees_its_blocks_within_two_steps(server, message, how):
    def begin():
        return getattr(started(server, message), how)

    assert fewest_steps(server, begin) <= MAX_STEPS


@pytest.mark.parametrize(
    ("model", "prompt"),
    [("llm", {"input_ids": [504, 3575, 282]}), ("generate", {"text_input": "The capital of"})],
)
def test_a_closed_generate_stream_frees_its_blocks_within_two_steps(server, model, prompt):
    def begin():
        return functools.partial(close, *over_http(server, model, **prompt))

    assert fewest_steps(server, begin) <= MAX_STEPS


def test_several_lost_at_once_end_within_two_steps(server):
    def begin():
        streams = [started(server, ENSEMBLE) for _ in range(4)]

        def leave():
            for stream in streams:
                stream.cancel()

        return leave

    max_steps = MAX_STEPS + 4
    assert fewest_steps(server, begin, max_steps) <= max_steps


def test_a_cancel_ends_only_its_own_request(server):
    """Two streams on two connections; the ids of the other one go on without a gap."""
    cancelled = started(server, DIRECT)
    prompt = tensor("input_ids", "INT32", [504, 3575, 282])
    bounded = request("llm", prompt, ENDLESS[0], ENDLESS[1], tensor("max_tokens", "INT32", 30))
    found = []
    other = threading.Thread(
        target=lambda: found.extend(answer["output_ids"] for answer in ask(server.grpc, bounded))
    )
    other.start()
    cancelled.cancel()
    other.join(60)
    flat = [id_ for part in found for id_ in (part if isinstance(part, list) else [part])]
    (alone,) = ask(
        server.grpc, request("llm", prompt, ENDLESS[1], tensor("max_tokens", "INT32", 30))
    )
    assert flat == alone["output_ids"]


def test_cancels_before_the_first_token_leave_nothing_behind(server):
    for _ in range(10):
        Stream(server.grpc, DIRECT).cancel()
        Stream(server.grpc, ENSEMBLE).cancel()
    server.wait_until_idle()


def test_a_living_ensemble_stream_is_never_set_aside(server):
    """With other streams cancelled, the remaining one has the same text as alone."""
    tokens = tensor("max_tokens", "INT32", 60)
    message = request("generate", text("Once upon a time"), ENDLESS[0], ENDLESS[1], tokens)
    (alone,) = ask(server.grpc, request("generate", text("Once upon a time"), ENDLESS[1], tokens))
    gone = [started(server, ENSEMBLE, 1) for _ in range(3)]
    survivor = Stream(server.grpc, message)
    first = survivor.next()["text_output"]
    for stream in gone:
        stream.cancel()
    rest = "".join(answer["text_output"] for answer in survivor)
    assert first + rest == alone["text_output"]
    server.wait_until_idle()


def batch_the_detokenizer(models):
    path = models / "detokenizer" / "config.pbtxt"
    batching = "max_batch_size: 256\ndynamic_batching { preserve_ordering: true }"
    config = path.read_text().replace("max_batch_size: 256", batching)
    path.write_text(config.replace("count: 1", "count: 2"))


def test_the_silence_of_a_batched_detokenizer_speaks(tmp_path):
    """Triton drops cancelled requests before a batched detokenizer; the engine is not notified."""
    with contextlib.contextmanager(serve)(tmp_path, "echo", batch_the_detokenizer) as triton:

        def begin():
            stream = started(triton, ENSEMBLE, num_responses=10)

            def leave():
                stream.cancel()
                triton.wait_for(lambda stats: stats.num_running == 0)
                set_aside = triton.stats()
                assert set_aside.num_free_blocks == set_aside.num_blocks

            return leave

        assert fewest_steps(triton, begin, 2 * MAX_STEPS) <= 2 * MAX_STEPS
