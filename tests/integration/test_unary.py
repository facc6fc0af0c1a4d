"""A model that is not decoupled: /infer, unary gRPC, and the clients of pytriton that use them."""

import asyncio
import http.client
import json

import grpc
import numpy as np
import pytest
from pytriton.client import AsyncioModelClient, FuturesModelClient, ModelClient
from tritonclient.grpc import service_pb2_grpc

from failpoint import failpoint
from kserve import ask, outputs, request, tensor, text
from supervised import serve, without_chat

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:tritonclient.grpc doesn't support timeout"),
]

PROMPT = "one two three four five six seven eight"
# More than any cancel takes, and less than the output.
LEAVES_S = 20.0


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Repeats prompts, in steps that a cancel can interrupt, behind both doors."""
    folder = tmp_path_factory.mktemp("unary")
    options = {"prepare": without_chat, "unary": True}
    with failpoint("slow", 5), serve(folder, "echo", "--grpc-guard", **options) as found:
        yield found


def infer(server, *inputs, prompt=PROMPT):
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        return outputs(stub.ModelInfer(request("completion", text(prompt), *inputs), timeout=60))


def post(server, route, body):
    connection = http.client.HTTPConnection(server.http, timeout=60)
    try:
        connection.request("POST", f"/v2/models/completion/{route}", json.dumps(body))
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def test_the_answer_is_that_of_the_ensemble(server):
    options = (tensor("max_tokens", "INT32", 6), tensor("num_logprobs", "INT32", 1))
    (answer,) = ask(server.grpc, request("generate", text(PROMPT), *options))
    assert infer(server, *options) == answer


def test_stream_is_answered_whole(server):
    assert infer(server, tensor("stream", "BOOL", True)) == infer(server)


def test_infer_over_http(server):
    inputs = [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [PROMPT]}]
    status, found = post(server, "infer", {"inputs": inputs})
    assert status == 200
    # LiteLLM takes the first output for the text.
    assert found["outputs"][0]["name"] == "text_output"
    assert found["outputs"][0]["data"] == [PROMPT]
    status, found = post(server, "generate", {"text_input": PROMPT, "stream": True})
    assert (status, found["text_output"]) == (200, PROMPT)


def test_an_invalid_request_is_refused_by_name(server):
    with pytest.raises(grpc.RpcError, match=r"top_p: .* is out of range"):
        infer(server, tensor("top_p", "FP32", 2.0))
    with pytest.raises(grpc.RpcError, match="text_input: is empty"):
        infer(server, prompt="")


@pytest.mark.client(
    "pytriton, ModelClient and AsyncioModelClient", "native --unary", package="nvidia-pytriton"
)
@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_pytritons_clients(server, scheme):
    url = f"{scheme}://{getattr(server, scheme)}"
    inputs = {"text_input": np.array([PROMPT.encode()]), "max_tokens": np.array([4], np.int32)}
    with ModelClient(url, "completion") as client:
        expected = client.infer_sample(**inputs)["text_output"].tolist()
    assert PROMPT.startswith(expected[0].decode()) and expected[0]

    async def run():
        async with AsyncioModelClient(url, "completion") as client:
            return await client.infer_sample(**inputs)

    assert asyncio.run(run())["text_output"].tolist() == expected


@pytest.mark.client("pytriton, FuturesModelClient", "native --unary", package="nvidia-pytriton")
def test_pytritons_futures(server):
    """This client of pytriton 0.7 speaks HTTP, whatever the address."""
    prompt = {"text_input": np.array([PROMPT.encode()])}
    with FuturesModelClient(f"http://{server.http}", "completion", max_workers=2) as client:
        futures = [client.infer_sample(**prompt) for _ in range(4)]
        found = [future.result(60)["text_output"].tolist() for future in futures]
    assert found == [[PROMPT.encode()]] * 4


def test_requests_run_at_the_same_time(server):
    """Triton runs one call of `execute` per instance; none of them waits for its answers."""
    endless = (tensor("max_tokens", "INT32", 3000), tensor("ignore_eos", "BOOL", True))
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        message = request("completion", text(PROMPT), *endless)
        calls = [stub.ModelInfer.future(message) for _ in range(4)]
        server.wait_until(lambda: server.stats().num_running == 4)
        for call in calls:
            call.cancel()
    server.wait_until_idle(LEAVES_S)


def test_a_closed_connection_ends_in_the_engine(server):
    body = {"text_input": PROMPT, "max_tokens": 8000, "ignore_eos": True}
    connection = http.client.HTTPConnection(server.http, timeout=60)
    connection.request("POST", "/v2/models/completion/generate", json.dumps(body))
    server.wait_until_running()
    connection.close()
    server.wait_until_idle(LEAVES_S)
