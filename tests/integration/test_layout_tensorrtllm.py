"""The requests that clients of TensorRT-LLM's backend send, to a real tritonserver with layout
tensorrtllm."""

import http.client
import json
import threading

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from failpoint import failpoint
from kserve import Refused, Stream, ask, outputs, request, tensor
from supervised import SMOLLM2, serve

pytestmark = pytest.mark.integration

TEXT_MODELS = ("ensemble", "tensorrt_llm_bls")
# The echo engine repeats it.
PROMPT = "one two three four five six seven eight"
IDS = [504, 3575, 282, 905, 600, 700, 800, 900]
# More than any cancel takes, and less than the output.
LEAVES_S = 20.0
NO_PROMPT = ("exclude_input_in_output", "BOOL", True)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Repeats prompts, in steps that a cancel can interrupt."""
    folder = tmp_path_factory.mktemp("tensorrtllm")
    with failpoint("slow", 5), serve(folder, "echo", layout="tensorrtllm", model=SMOLLM2) as found:
        yield found


def batch(name, datatype, values):
    """A tensor of shape [1, N]."""
    values = values if isinstance(values, list) else [values]
    return tensor(name, datatype, values, [1, len(values)])


def text_request(model, *inputs, prompt=PROMPT, max_tokens=16, **fields):
    prompt = batch("text_input", "BYTES", prompt)
    options = [batch(*one) for one in inputs]
    return request(model, prompt, batch("max_tokens", "INT32", max_tokens), *options, **fields)


def ids_request(*inputs, max_tokens=16, **fields):
    given = (
        ("input_ids", "INT32", IDS),
        ("input_lengths", "INT32", len(IDS)),
        ("request_output_len", "INT32", max_tokens),
        *inputs,
    )
    return request("tensorrt_llm", *[batch(*one) for one in given], **fields)


def infer(server, message):
    """The response of a model that is not decoupled."""
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        return outputs(stub.ModelInfer(message, timeout=60))


def post(server, model, body, route="generate"):
    connection = http.client.HTTPConnection(server.http, timeout=60)
    try:
        connection.request("POST", f"/v2/models/{model}/{route}", json.dumps(body))
        return connection.getresponse().read().decode()
    finally:
        connection.close()


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_a_client_of_the_whole_pipeline(server, model):
    """The inputs of the backend's own end-to-end client."""
    inputs = (
        ("stream", "BOOL", False),
        ("beam_width", "INT32", 1),
        ("temperature", "FP32", 1.0),
        ("num_return_sequences", "INT32", 1),
        ("repetition_penalty", "FP32", 1.0),
        ("stop_words", "BYTES", [""]),
        ("bad_words", "BYTES", [""]),
        ("end_id", "INT32", 2),
        ("pad_id", "INT32", 2),
    )
    (answer,) = ask(server.grpc, text_request(model, *inputs))
    assert answer["text_output"] == PROMPT + PROMPT
    assert (answer["batch_index"], answer["sequence_index"]) == ([0], [0])
    (answer,) = ask(server.grpc, text_request(model, *inputs, NO_PROMPT))
    assert answer["text_output"] == PROMPT
    parts = ask(server.grpc, text_request(model, *inputs[1:], ("stream", "BOOL", True)))
    assert len(parts) > 2
    assert "".join(part["text_output"] for part in parts) == PROMPT


@pytest.mark.client(
    "Triton's OpenAI frontend, requests of its converter for other backends",
    "tensorrtllm",
    version="2.73.0dev, 2026-08-19",
    lacking="chats without a stream need `exclude_input_in_output` true in config.pbtxt; "
    "the frontend has no log-probabilities here",
)
@pytest.mark.parametrize("model", TEXT_MODELS)
@pytest.mark.parametrize("stream", [True, False])
def test_tritons_openai_frontend(server, model, stream):
    inputs = (
        ("stream", "BOOL", stream),
        ("top_p", "FP32", 1.0),
        ("frequency_penalty", "FP32", 0.0),
        ("presence_penalty", "FP32", 0.0),
        ("temperature", "FP32", 0.7),
        ("seed", "UINT64", 3),
        ("stop_words", "BYTES", ["zzz", "\n\n"]),
        ("return_num_input_tokens", "BOOL", True),
        ("return_num_output_tokens", "BOOL", True),
    )
    # Completions have it; chats do not.
    parts = ask(server.grpc, text_request(model, *inputs, NO_PROMPT))
    assert "".join(part["text_output"] for part in parts) == PROMPT
    assert {part["num_input_tokens"][0] for part in parts} == {8}
    assert sum(part["num_output_tokens"][0] for part in parts) == 9  # with the end of the text
    chats = ask(server.grpc, text_request(model, *inputs))
    assert "".join(part["text_output"] for part in chats) == (PROMPT if stream else 2 * PROMPT)


def test_several_sequences_are_responses_with_an_index(server):
    inputs = (("num_return_sequences", "INT32", 2), ("top_k", "INT32", 5), NO_PROMPT)
    answers = ask(server.grpc, text_request("ensemble", *inputs))
    assert [answer["sequence_index"] for answer in answers] == [[0], [1]]
    assert [answer["text_output"] for answer in answers] == [PROMPT, PROMPT]


def test_a_stop_word_ends_the_text(server):
    inputs = (("stop_words", "BYTES", [" four", " six"]), NO_PROMPT)
    (answer,) = ask(server.grpc, text_request("ensemble", *inputs))
    assert answer["text_output"] == "one two three"


def test_generate_over_http(server):
    body = {"text_input": PROMPT, "max_tokens": 4, "bad_words": "", "stop_words": ""}
    assert json.loads(post(server, "ensemble", body))["text_output"] == PROMPT + PROMPT[:18]
    # As load generators send it: names of other backends are ignored.
    body |= {"accumulate_tokens": True, "stream": True, "end_id": -1, "unknown": 1}
    events = post(server, "ensemble", body, "generate_stream")
    parts = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: ")]
    assert "".join(part["text_output"] for part in parts) == PROMPT[:18]


def test_a_client_of_the_engine(server):
    """The inputs of the backend's own client for token ids."""
    inputs = (
        ("beam_width", "INT32", 1),
        ("temperature", "FP32", 1.0),
        ("end_id", "INT32", -1),
        ("pad_id", "INT32", 2),
        ("runtime_top_k", "INT32", 1),
        ("runtime_top_p", "FP32", 0.0),
    )
    (answer,) = ask(server.grpc, ids_request(*inputs, ("streaming", "BOOL", False), max_tokens=8))
    assert answer["output_ids"] == IDS + IDS
    assert answer["sequence_length"] == [16]
    parts = ask(server.grpc, ids_request(*inputs, ("streaming", "BOOL", True), max_tokens=8))
    assert [id_ for part in parts for id_ in part["output_ids"]] == IDS
    assert sum(part["sequence_length"][0] for part in parts) == 8


def test_the_steps_can_be_called_one_by_one(server):
    """Text to ids, ids to ids, ids to text."""
    query = (("QUERY", "BYTES", PROMPT), ("REQUEST_OUTPUT_LEN", "INT32", 8))
    words = ("STOP_WORDS_DICT", "BYTES", [" four"])
    message = request("preprocessing", *[batch(*one) for one in (*query, words)])
    found = infer(server, message)
    names = {"INPUT_ID": "input_ids", "REQUEST_INPUT_LEN": "input_lengths"}
    names |= {"REQUEST_OUTPUT_LEN": "request_output_len", "OUT_END_ID": "end_id"}
    inputs = [batch(ours, "INT32", found[theirs]) for theirs, ours in names.items()]
    stop = found["STOP_WORDS_IDS"]
    inputs.append(tensor("stop_words_list", "INT32", stop, [1, 2, len(stop) // 2]))
    inputs.append(batch(*NO_PROMPT))
    (answer,) = ask(server.grpc, request("tensorrt_llm", *inputs))
    tokens = answer["output_ids"]
    message = request(
        "postprocessing",
        tensor("TOKENS_BATCH", "INT32", tokens, [1, 1, len(tokens)]),
        batch("SEQUENCE_LENGTH", "INT32", len(tokens)),
    )
    assert infer(server, message)["OUTPUT"] == "one two three four"


def test_stop_ends_the_request_with_its_id(server):
    endless = (("end_id", "INT32", -1), ("streaming", "BOOL", True))
    call = Stream(server.grpc, ids_request(*endless, max_tokens=8000, id="7"))
    server.wait_until_running()
    stop = ids_request(("stop", "BOOL", True), max_tokens=0, id="7")
    assert ask(server.grpc, stop) == [{}]
    parts = list(call)
    assert 0 < sum(part["sequence_length"][0] for part in parts) < 8000
    server.wait_until_idle(LEAVES_S)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([("lora_task_id", "UINT64", 3)], "lora_task_id: is not supported: LoRA"),
        ([("return_context_logits", "BOOL", True)], "return_context_logits: is not supported"),
        ([("return_generation_logits", "BOOL", True)], "return_generation_logits: is not supp"),
        ([("prompt_vocab_size", "INT32", 3)], "prompt_vocab_size: is not supported"),
        ([("top_p", "FP32", 3.0)], "top_p: 3.0 is out of range"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(server, inputs, message):
    with pytest.raises(Refused, match=message):
        ask(server.grpc, text_request("ensemble", *inputs))


def test_a_request_without_max_tokens_or_with_two_prompts_is_refused(server):
    with pytest.raises(Refused, match="max_tokens: is missing"):
        ask(server.grpc, request("ensemble", batch("text_input", "BYTES", PROMPT)))
    two = [
        tensor("text_input", "BYTES", ["a", "b"], [2, 1]),
        tensor("max_tokens", "INT32", [1, 1], [2, 1]),
    ]
    with pytest.raises(Refused, match="batch-size must be <= 1"):
        ask(server.grpc, request("ensemble", *two))


@pytest.mark.parametrize("how", ["cancel", "hang_up"])
def test_a_cancelled_call_ends_in_the_engine(server, how):
    call = Stream(server.grpc, text_request("ensemble", ("end_id", "INT32", -1), max_tokens=8000))
    server.wait_until_running()
    getattr(call, how)()
    server.wait_until_idle(LEAVES_S)


def test_a_closed_connection_ends_in_the_engine(server):
    body = {"text_input": PROMPT, "max_tokens": 8000, "end_id": -1}
    connection = http.client.HTTPConnection(server.http, timeout=60)
    connection.request("POST", "/v2/models/ensemble/generate", json.dumps(body))
    server.wait_until_running()
    connection.close()
    server.wait_until_idle(LEAVES_S)


def test_parallel_requests_of_all_models_do_not_mix(server):
    """Three fronts share the engine."""
    found = {}

    def run(place):
        model = TEXT_MODELS[place % 2]
        prompt = f"{PROMPT} {place}"
        (answer,) = ask(server.grpc, text_request(model, NO_PROMPT, prompt=prompt))
        found[place] = answer["text_output"] == prompt

    threads = [threading.Thread(target=run, args=(place,)) for place in range(6)]
    for thread in threads:
        thread.start()
    (answer,) = ask(server.grpc, ids_request(max_tokens=8))
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(6), True)
    assert answer["output_ids"] == IDS + IDS


def test_a_model_answers_greedily_unless_top_k_or_top_p_is_set(tmp_path_factory):
    """The small model; the log-probabilities are those of its tokens."""
    with serve(tmp_path_factory.mktemp("model"), "cpu", layout="tensorrtllm") as model:
        prompt = "The capital of France is"
        inputs = (("temperature", "FP32", 1.0), ("return_log_probs", "BOOL", True), NO_PROMPT)
        message = text_request("ensemble", *inputs, prompt=prompt, max_tokens=4)
        (answer,) = ask(model.grpc, message)
        assert answer["text_output"].startswith(" Paris")
        assert len(answer["output_log_probs"]) == 4
        assert sum(answer["output_log_probs"]) == pytest.approx(answer["cum_log_probs"][0], 1e-4)
        beams = text_request(
            "ensemble", ("beam_width", "INT32", 2), NO_PROMPT, prompt=prompt, max_tokens=4
        )
        (answer,) = ask(model.grpc, beams)
        assert len(answer["text_output"]) == 2
        # As Triton's OpenAI frontend asks for the arguments of a function.
        guided = (
            ("guided_decoding_guide_type", "BYTES", "json_schema"),
            ("guided_decoding_guide", "BYTES", json.dumps({"enum": ["red", "green"]})),
        )
        (answer,) = ask(model.grpc, text_request("ensemble", *guided, NO_PROMPT))
        assert json.loads(answer["text_output"]) in ("red", "green")
