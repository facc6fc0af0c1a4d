"""A real tritonserver behind the gRPC door: what is good is served as without it, what is bad never
reaches it. Numbers are those of the catalogue in test_bad_input.py."""

import asyncio
import json
import queue
import socket
import threading
import time

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

import bad_grpc
import perf_analyzer
from grpc_guard import OWN, SERVICE, opened
from kserve import Refused, Stream, ask, request, tensor, text

pytestmark = pytest.mark.integration

CODE = grpc.StatusCode
STREAM = tensor("stream", "BOOL", True)
IGNORE_EOS = tensor("ignore_eos", "BOOL", True)
PROMPT = "A prompt of some words."
NUM_STREAMS = 32
NUM_CONNECTIONS = 1000


@pytest.fixture(scope="module")
def door(echo, tmp_path_factory):
    limits = {"write_timeout_s": 2.0, "header_timeout_s": 5.0}
    options = ("--workers", "2", "--drain", "5")
    with opened(tmp_path_factory.mktemp("door"), echo.grpc, *options, **limits) as found:
        yield found


@pytest.fixture(autouse=True)
def tritonserver_is_unaffected(echo):
    yield
    assert echo.canary() == "The canary sings."
    echo.wait_until_idle()


def max_tokens(count):
    return tensor("max_tokens", "INT32", count)


def joined(answers):
    return "".join(answer["text_output"] for answer in answers)


# ---------------------------------------------------------------- what is good


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_request_is_answered_as_without_the_door(echo, door, is_streamed):
    inputs = [text(PROMPT), max_tokens(16), IGNORE_EOS, tensor("stream", "BOOL", is_streamed)]
    message = request("generate", *inputs, id="5")
    assert joined(ask(door.address, message)) == joined(ask(echo.grpc, message))


def test_metadata_is_as_without_the_door(echo, door):
    with grpc.insecure_channel(echo.grpc, options=OWN) as channel:
        direct = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for method, message in (
            ("ServerLive", service_pb2.ServerLiveRequest()),
            ("ServerReady", service_pb2.ServerReadyRequest()),
            ("ServerMetadata", service_pb2.ServerMetadataRequest()),
            ("ModelReady", service_pb2.ModelReadyRequest(name="generate")),
            ("ModelMetadata", service_pb2.ModelMetadataRequest(name="generate")),
            ("ModelConfig", service_pb2.ModelConfigRequest(name="llm", version="1")),
            ("ModelStatistics", service_pb2.ModelStatisticsRequest(name="chat")),
        ):
            expected = getattr(direct, method)(message)
            assert getattr(door.stub, method)(message) == expected, method


def prompt_inputs():
    prompt = tritonclient.grpc.InferInput("text_input", [1], "BYTES")
    prompt.set_data_from_numpy(np.array([PROMPT.encode()], dtype=np.object_))
    stream = tritonclient.grpc.InferInput("stream", [1], "BOOL")
    stream.set_data_from_numpy(np.array([True]))
    return [prompt, stream]


def test_tritonclient(door):
    answers = queue.Queue()
    with tritonclient.grpc.InferenceServerClient(door.address) as client:
        assert client.is_server_ready() and client.is_model_ready("generate")
        client.start_stream(lambda result, error: answers.put((result, error)))
        outputs = [tritonclient.grpc.InferRequestedOutput("text_output")]
        client.async_stream_infer(
            "generate",
            prompt_inputs(),
            request_id="1",
            outputs=outputs,
            enable_empty_final_response=True,
            parameters=None,
        )
        parts = []
        while True:
            result, error = answers.get(timeout=60)
            assert error is None
            response = result.get_response()
            if response.outputs:
                parts.append(result.as_numpy("text_output")[0].decode())
            if response.parameters["triton_final_response"].bool_param:
                break
        client.stop_stream()
        assert "".join(parts) == PROMPT
        with pytest.raises(InferenceServerException, match="RepositoryModelUnload: is closed"):
            client.unload_model("generate")
        result = client.infer("tokenizer", prompt_inputs()[:1])
        assert len(result.as_numpy("input_ids")) > 3


def test_tritonclient_aio(door):
    async def run():
        async with tritonclient.grpc.aio.InferenceServerClient(door.address) as client:
            assert await client.is_server_live()

            async def requests():
                yield {"model_name": "generate", "inputs": prompt_inputs(), "request_id": "1"}

            parts = []
            async for result, error in client.stream_infer(requests()):
                assert error is None
                parts.append(result.as_numpy("text_output")[0].decode())
            return "".join(parts)

    assert asyncio.run(run()) == PROMPT


def test_32_streams_at_once(door):
    tokens = max_tokens(64)
    found = {}

    def run(index):
        message = request("generate", text(f"Stream {index}. "), STREAM, IGNORE_EOS, tokens)
        found[index] = joined(ask(door.address, message))

    threads = [threading.Thread(target=run, args=(index,)) for index in range(NUM_STREAMS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == NUM_STREAMS
    for index, answer in found.items():
        prompt = f"Stream {index}. "
        assert len(answer) > 100 and (prompt * 100).startswith(answer)


def test_perf_analyzer(door, tmp_path):
    options = {"max_tokens": [16], "ignore_eos": [True], "stream": [True]}
    data = tmp_path / "prompts.json"
    data.write_text(json.dumps({"data": [{"text_input": ["Tell me a story."], **options}]}))
    perf_analyzer.run(
        f"""
        -m generate -u {door.address} -i grpc --streaming --async
        --concurrency-range {NUM_STREAMS} --measurement-mode count_windows
        --measurement-request-count 64 --max-trials 4 --stability-percentage 999
        """,
        data,
    )


# ---------------------------------------------------------------- what is bad


@pytest.mark.parametrize("case", bad_grpc.CASES)
def test_bad_grpc(echo, door, case):
    """Refused on a stream, which goes on, and by ModelInfer."""
    data, message = bad_grpc.CASES[case]
    before = echo.server.pid
    requests = queue.Queue()
    call = door.channel.stream_stream(f"{SERVICE}/ModelStreamInfer")(iter(requests.get, None))
    requests.put(data)
    answer = service_pb2.ModelStreamInferResponse.FromString(next(call))
    assert message in answer.error_message
    requests.put(request("generate", text("x y"), id="2").SerializeToString())
    answer = service_pb2.ModelStreamInferResponse.FromString(next(call))
    assert answer.infer_response.id == "2" and not answer.error_message
    requests.put(None)
    assert not list(call)
    with pytest.raises(grpc.RpcError) as caught:
        door.channel.unary_unary(f"{SERVICE}/ModelInfer")(data)
    assert caught.value.code() is CODE.INVALID_ARGUMENT
    assert message in caught.value.details()
    assert echo.server.pid == before


MODELS = {
    "case-23-unknown": (request("unknown", text("x")), "'unknown' is not found"),
    "case-24-version": (request("generate", text("x")), "version"),
    "case-25-missing": (request("generate", max_tokens(5)), "text_input: is missing"),
    "case-26-unknown": (request("generate", text("x"), tensor("y", "INT32", 1)), "'y'"),
    "case-28-dtype": (request("generate", text("x"), tensor("max_tokens", "INT64", 5)), "data-t"),
    "case-31-dim-0": (request("llm", ("input_ids", "INT32", [0], b"")), "input_ids"),
    "case-41-rank": (request("generate", ("text_input", "BYTES", [1, 1], b"\1\0\0\0x")), "'text_"),
    "case-50-unknown": (request("generate", text("x"), parameters={"y": 1}), "y: is neither"),
}
MODELS["case-24-version"][0].model_version = "1000000000000"


@pytest.mark.parametrize("case", MODELS)
def test_what_a_model_refuses_is_passed_on(door, case):
    message, expected = MODELS[case]
    with pytest.raises(Refused) as caught:
        ask(door.address, message)
    assert expected in str(caught.value)


def test_case_47_an_unknown_output_is_refused(door):
    message = request("generate", text("x"))
    message.outputs.add(name="nothing")
    with pytest.raises(Refused, match="nothing"):
        ask(door.address, message)


def test_case_49_model_infer_of_a_streaming_model_says_what_to_use(door):
    with pytest.raises(grpc.RpcError) as caught:
        door.stub.ModelInfer(request("generate", text("x")))
    assert caught.value.code() is CODE.UNIMPLEMENTED
    assert "ModelStreamInfer" in caught.value.details()


def test_refusals_of_the_first_step_with_triton_grpc_error_are_survived(door):
    """Some dozens of them on one channel crashed tritonserver 2.51."""
    message = request("generate", text(""))
    for _ in range(150):
        call = door.stub.ModelStreamInfer(
            iter([message]), metadata=(("triton_grpc_error", "true"),), timeout=60
        )
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert "text_input: is empty" in caught.value.details()


def test_case_103_a_thousand_idle_streams(echo, door):
    async def hold():
        async with grpc.aio.insecure_channel(door.address, options=OWN) as channel:
            calls = [channel.stream_stream(f"{SERVICE}/ModelStreamInfer")() for _ in range(1000)]
            refused = b"\x0a\x00"  # a message that is answered by the door
            await asyncio.gather(*(call.write(refused) for call in calls))
            await asyncio.gather(*(call.read() for call in calls))
            answers = await asyncio.to_thread(
                ask, door.address, request("generate", text("x y"), STREAM)
            )
            for call in calls:
                call.cancel()
            return joined(answers)

    assert asyncio.run(hold()) == "x y"
    assert door.stub.ServerReady(service_pb2.ServerReadyRequest()).ready


def test_case_104_a_thousand_connections(door):
    host, port = door.address.rsplit(":", 1)
    sockets = [socket.create_connection((host, int(port)), 60) for _ in range(NUM_CONNECTIONS)]
    assert joined(ask(door.address, request("generate", text("x y")))) == "x y"
    for one in sockets:
        one.close()


# ---------------------------------------------------------------- cancels, slow readers, drain

ENDLESS = request("generate", text(PROMPT), STREAM, IGNORE_EOS, max_tokens(8000))


@pytest.fixture(scope="module")
def cpu_door(cpu, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cpu-door")
    with opened(folder, cpu.grpc, "--workers", "1", "--drain", "5") as found:
        yield found


@pytest.mark.parametrize("how", ["cancel", "hang_up"])
def test_case_100_a_lost_client_reaches_the_engine(cpu, cpu_door, how):
    stream = Stream(cpu_door.address, ENDLESS)
    for _ in range(3):
        stream.next()
    stats = cpu.stats()  # an engine that is faster than its reader suspends the request
    assert stats.num_running + stats.num_suspended == 1
    getattr(stream, how)()
    cpu.wait_until_idle()


def test_case_102_a_slow_reader_is_cut_off_and_others_are_served(echo, door):
    """A client's window takes a few megabytes: requests are sent until it is full. Of tokens with
    64 characters, it needs few."""
    message = request("generate", text("=" * 64), STREAM, IGNORE_EOS, max_tokens(2000))
    requests = queue.Queue()
    call = door.stub.ModelStreamInfer(iter(requests.get, None))

    def is_passed_on():
        before = echo.stats().num_prompt_tokens
        requests.put(message)
        deadline = time.monotonic() + 10.0
        while time.monotonic() < deadline:
            if echo.stats().num_prompt_tokens > before:
                return True
            time.sleep(0.01)
        return False

    for _ in range(64):
        requests.put(message)
    started = time.monotonic()
    while is_passed_on():
        assert time.monotonic() - started < 200
    for _ in range(10):
        assert joined(ask(door.address, request("generate", text("x y")))) == "x y"
    echo.wait_until_idle()
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert caught.value.code() is CODE.RESOURCE_EXHAUSTED
    requests.put(None)


def test_sigterm_with_idle_streams(echo, tmp_path):
    with opened(tmp_path, echo.grpc, "--workers", "2", "--drain", "120") as door:
        idle = [queue.Queue() for _ in range(8)]
        calls = [door.stub.ModelStreamInfer(iter(requests.get, None)) for requests in idle]
        for requests, call in zip(idle, calls, strict=True):
            requests.put(request("generate", text("x y")))
            assert next(call).infer_response.outputs
        door.process.terminate()
        for call in calls:
            with pytest.raises(grpc.RpcError) as caught:
                list(call)
            assert caught.value.code() is CODE.UNAVAILABLE
        assert door.process.wait(60) == 0, "not the time of the drain"
        for requests in idle:
            requests.put(None)


def test_sigterm_lets_a_request_finish(cpu, tmp_path):
    inputs = [text(PROMPT), IGNORE_EOS, max_tokens(40)]
    (alone,) = ask(cpu.grpc, request("generate", *inputs))
    with opened(tmp_path, cpu.grpc, "--workers", "1", "--drain", "120") as door:
        stream = Stream(door.address, request("generate", *inputs, STREAM))
        first = stream.next()["text_output"]
        door.process.terminate()
        assert first + joined(stream) == alone["text_output"]
        assert door.process.wait(60) == 0
