"""The requests that clients of vLLM's backend send, to a real tritonserver with layout vllm."""

import http.client
import json
import threading

import numpy as np
import pytest
import tritonclient.grpc as triton
from pytriton.client import DecoupledModelClient

from failpoint import failpoint
from kserve import Refused, Stream, ask, request, tensor, text
from supervised import serve
from waiting import wait_until

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:tritonclient.grpc doesn't support timeout"),
]

MODEL = "vllm_model"
# The echo engine repeats it; more tokens than vLLM's default.
PROMPT = " ".join(f"The capital of country {letter} is city {letter}." for letter in "ABCD")
GREEDY = {"temperature": "0", "top_p": "1"}
FLAGS = ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens")
# More than any cancel takes, and less than the output.
LEAVES_S = 20.0
ENDLESS = {"max_tokens": 8000, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Repeats prompts, in steps that a cancel can interrupt, behind both doors."""
    folder = tmp_path_factory.mktemp("vllm")
    with failpoint("slow", 5), serve(folder, "echo", "--grpc-guard", layout="vllm") as found:
        yield found


def sampling(**options):
    return tensor("sampling_parameters", "BYTES", json.dumps(options))


def flag(name, value=True):
    return tensor(name, "BOOL", value)


def complete(server, *inputs, prompt=PROMPT, **fields):
    return ask(server.grpc, request(MODEL, text(prompt), *inputs, **fields))


def whole(server, *inputs, **fields):
    (answer,) = complete(server, *inputs, **fields)
    return answer


def post(server, body, route="generate"):
    connection = http.client.HTTPConnection(server.http, timeout=60)
    try:
        connection.request("POST", f"/v2/models/{MODEL}/{route}", json.dumps(body))
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def test_the_defaults_are_vllms(server):
    """16 tokens, after the prompt, and no other output."""
    answer = whole(server, sampling(**GREEDY))
    assert set(answer) == {"text_output"}
    assert (
        answer["text_output"]
        == PROMPT + whole(server, flag("exclude_input_in_output"))["text_output"]
    )
    counted = whole(server, sampling(**GREEDY), flag("return_num_output_tokens"))
    assert counted["num_output_tokens"] == 16


def test_a_stream_has_only_new_text_and_adds_up_to_the_whole(server):
    parts = complete(server, flag("stream"), sampling(**GREEDY))
    streamed = "".join(part["text_output"] for part in parts)
    assert len(parts) > 3
    assert PROMPT + streamed == whole(server, sampling(**GREEDY))["text_output"]


def test_the_prompt_can_be_excluded(server):
    echoed = whole(server, sampling(**GREEDY), flag("exclude_input_in_output", False))
    alone = whole(server, sampling(**GREEDY), flag("exclude_input_in_output"))
    assert echoed["text_output"] == PROMPT + alone["text_output"]


def test_a_stream_with_the_prompt_is_refused(server):
    with pytest.raises(
        Refused, match="When streaming, `exclude_input_in_output` = False is not allowed"
    ):
        complete(server, flag("stream"), flag("exclude_input_in_output", False))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize("wanted", [FLAGS[:2], FLAGS[2:], FLAGS])
def test_outputs_are_those_that_flags_request(server, stream, logprobs, wanted):
    options = GREEDY if logprobs is None else {**GREEDY, "logprobs": logprobs}
    flags = [flag(f"return_{name}", name in wanted) for name in FLAGS]
    parts = complete(server, flag("stream", stream), sampling(**options), *flags)
    for part in parts:
        assert set(part) == {"text_output", *wanted}
    if "finish_reason" in wanted:
        reasons = [part["finish_reason"] for part in parts]
        assert reasons == ["None"] * (len(parts) - 1) + ["length"]
    if "num_output_tokens" in wanted:
        assert sum(part["num_output_tokens"] for part in parts) == 16
        assert all(part["num_output_tokens"] > 0 for part in parts)
    if "logprobs" in wanted:  # the echo engine has none
        expected = None if logprobs is None else []
        assert [json.loads(part["logprobs"]) for part in parts] == [expected] * len(parts)


def test_request_parameters_count_without_the_tensor(server):
    short = {"temperature": "0", "max_tokens": 3}
    counted = flag("return_num_output_tokens")
    assert whole(server, counted, parameters=short)["num_output_tokens"] == 3
    both = whole(server, counted, sampling(temperature=0, max_tokens=5), parameters=short)
    assert both["num_output_tokens"] == 5
    # They are not options then: vLLM's backend does not read them.
    assert whole(server, counted, sampling(max_tokens=2), parameters={"other": 1})


def test_n_outputs_are_elements_of_each_response(server):
    options = sampling(n=2, temperature=1, seed=3, max_tokens=6)
    asked = (flag("return_finish_reason"), flag("return_num_output_tokens"))
    answer = whole(server, options, flag("exclude_input_in_output"), *asked)
    parts = complete(server, options, flag("stream"), *asked)
    assert all(len(part["text_output"]) == 2 for part in parts)
    streamed = [
        "".join(texts) for texts in zip(*[part["text_output"] for part in parts], strict=True)
    ]
    assert streamed == answer["text_output"]
    assert parts[-1]["finish_reason"] == answer["finish_reason"] == ["length", "length"]


@pytest.mark.client(
    "Triton's OpenAI frontend, requests of its converter for vLLM",
    "vllm",
    version="2.73.0dev, 2026-08-19",
    lacking="its embeddings; log-probabilities, which it requests of a backend named `vllm` alone",
)
@pytest.mark.parametrize(
    ("options", "num_tokens"),
    [
        ({}, 16),
        ({"stop": ["\n\n"], "seed": 3, "temperature": 0.7}, 16),
        ({"stop": "zzz", "seed": -1, "min_tokens": 4, "ignore_eos": True, "max_tokens": 6}, 6),
        ({"logprobs": 1}, 16),
    ],
)
def test_tritons_openai_frontend(server, options, num_tokens):
    """All tensors, always, and as JSON those fields of its request that are not null."""
    fields = {"frequency_penalty": 0, "presence_penalty": 0, "ignore_eos": False, "n": 1}
    fields |= {"temperature": 0.0, "top_p": 1, "max_tokens": 16, **options}
    tensors = [
        flag("return_logprobs", "logprobs" in options),
        flag("exclude_input_in_output"),
        sampling(**fields),
        flag("return_num_input_tokens"),
        flag("return_num_output_tokens"),
    ]
    answer = whole(server, *tensors, flag("stream", False))
    parts = complete(server, *tensors, flag("stream"))
    for found in ([answer], parts):
        assert sum(part["num_output_tokens"] for part in found) == num_tokens
        assert PROMPT.startswith("".join(part["text_output"] for part in found))
        assert all(("logprobs" in part) == ("logprobs" in options) for part in found)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([tensor("image", "BYTES", "aGVsbG8=")], "image: is not supported: only text"),
        ([tensor("embedding_request", "BYTES", "{}")], "embedding_request: is not supported"),
        ([sampling(temperture=1)], "did you mean 'temperature'"),
        ([sampling(lora_name="adapter")], "lora_name is"),
        ([sampling(max_tokens="many")], "max_tokens is"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(server, inputs, message):
    with pytest.raises(Refused, match=message):
        complete(server, *inputs)


def test_generate_over_http(server):
    """As the README of vLLM's backend has it: options in `parameters`."""
    body = {"text_input": PROMPT, "parameters": {"stream": False, "temperature": 0}}
    answer = json.loads(post(server, body))
    assert answer["text_output"] == whole(server)["text_output"]
    body = {"text_input": PROMPT, "parameters": {"stream": True, "temperature": 0}}
    events = post(server, body, "generate_stream")
    parts = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: ")]
    assert PROMPT + "".join(part["text_output"] for part in parts) == answer["text_output"]
    body = {"text_input": PROMPT, "exclude_input_in_output": True, "max_tokens": 1}
    assert json.loads(post(server, {**body, "temperature": 0}))["text_output"] == PROMPT[:3]


def test_the_final_flag_comes_alone(server):
    """Clients that discard a flagged response lose nothing."""
    responses = []
    with triton.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: responses.append(error or result))
        prompt = triton.InferInput("text_input", [1], "BYTES")
        prompt.set_data_from_numpy(np.array([PROMPT.encode()], object))
        client.async_stream_infer(MODEL, [prompt], enable_empty_final_response=True)
        client.stop_stream()
    flags = [one.get_response().parameters["triton_final_response"].bool_param for one in responses]
    assert flags == [False, True]
    assert responses[0].as_numpy("text_output") is not None
    assert not responses[1].get_response().outputs


@pytest.mark.client("pytriton, DecoupledModelClient", "vllm", package="nvidia-pytriton")
def test_pytritons_decoupled_client_gets_all_of_the_text(server):
    with DecoupledModelClient(f"grpc://{server.grpc}", MODEL) as client:
        found = client.infer_sample(
            text_input=np.array([PROMPT.encode()]),
            stream=np.array([True]),
            sampling_parameters=np.array([json.dumps(GREEDY).encode()]),
        )
        streamed = "".join(part["text_output"][0].decode() for part in found)
    assert PROMPT + streamed == whole(server, sampling(**GREEDY))["text_output"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", ["cancel", "hang_up"])
def test_a_cancelled_call_ends_in_the_engine(server, stream, how):
    message = request(MODEL, text(PROMPT), flag("stream", stream), sampling(**ENDLESS))
    call = Stream(server.grpc, message)
    server.wait_until_running()
    getattr(call, how)()
    server.wait_until_idle(LEAVES_S)


def test_a_cancelled_request_is_logged_as_by_vllm_s_backend(server):
    """Its request_cancellation_test.py looks for these lines."""
    message = request(MODEL, text(PROMPT), sampling(**ENDLESS))
    message.id = "a-request"
    call = Stream(server.grpc, message)
    server.wait_until_running()
    call.cancel()
    for line in ("[vllm] Cancelling the request", "[vllm] Successfully cancelled the request"):
        wait_until(lambda line=line: f"{line} a-request" in server.log.read_text())


@pytest.mark.parametrize("route", ["generate", "generate_stream"])
def test_a_closed_connection_ends_in_the_engine(server, route):
    connection = http.client.HTTPConnection(server.http, timeout=60)
    body = {"text_input": PROMPT, "stream": route == "generate_stream", **ENDLESS}
    connection.request("POST", f"/v2/models/{MODEL}/{route}", json.dumps(body))
    server.wait_until_running()
    connection.close()
    server.wait_until_idle(LEAVES_S)


def test_a_health_check_finds_the_model_in_the_index(server):
    """As check_health_test.py of vLLM's backend asks; the door for gRPC has the index."""
    with triton.InferenceServerClient(server.grpc) as client:
        assert client.is_model_ready(MODEL)
        found = [(one.name, one.state) for one in client.get_model_repository_index().models]
    assert found == [(MODEL, "READY")]


def test_parallel_streams_do_not_mix(server):
    prompts = [f"Count: {number}, {number + 1}," for number in range(4)]
    alone = [whole(server, sampling(**GREEDY), prompt=prompt)["text_output"] for prompt in prompts]
    found = [""] * len(prompts)

    def run(place):
        parts = complete(server, flag("stream"), sampling(**GREEDY), prompt=prompts[place])
        found[place] = prompts[place] + "".join(part["text_output"] for part in parts)

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == alone


def test_a_model_answers_as_in_vllms_backend(tmp_path_factory):
    """The small model, greedy: the text that follows, its logprobs, and one of two words."""
    prompt = "The capital of France is"
    with serve(tmp_path_factory.mktemp("model"), "cpu", layout="vllm") as model:
        options = {**GREEDY, "max_tokens": 4, "logprobs": 1}
        parts = complete(
            model, flag("stream"), flag("return_logprobs"), sampling(**options), prompt=prompt
        )
        streamed = "".join(part["text_output"] for part in parts)
        assert streamed.startswith(" Paris")
        tokens = [token for part in parts for token in json.loads(part["logprobs"])]
        best = [next(one for one in token.values() if one["rank"] == 1) for token in tokens]
        assert "".join(one["decoded_token"] for one in best) == streamed
        assert whole(model, sampling(**options), prompt=prompt)["text_output"] == prompt + streamed
        # All fields of vLLM's class, as Triton's OpenAI frontend sends them.
        unset = dict.fromkeys(("json", "regex", "grammar", "json_object", "whitespace_pattern"))
        unset |= {"structural_tag": None, "_backend": None, "_backend_was_auto": False}
        unset |= {"disable_any_whitespace": False, "disable_additional_properties": False}
        choices = json.dumps({"choice": ["Positive", "Negative"], **unset})
        for key in ("structured_outputs", "guided_decoding"):
            options = sampling(**{"temperature": 0, key: choices})
            answer = whole(model, options, flag("exclude_input_in_output"), prompt=prompt)
            assert answer["text_output"] in ("Positive", "Negative")
