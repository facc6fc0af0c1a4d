"""Responses of a real server over gRPC and HTTP."""

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from kserve import (
    Refused,
    Stream,
    ask,
    generate,
    generate_stream,
    outputs,
    post,
    request,
    tensor,
    text,
)
from prompts import PROMPTS
from texts import TEXTS

pytestmark = pytest.mark.integration

STREAM = tensor("stream", "BOOL", True)
RETURN_LOG_PROBS = tensor("return_log_probs", "BOOL", True)
ANSWER = {
    "text_output",
    "index",
    "finish_reason",
    "num_input_tokens",
    "num_output_tokens",
    "cumulative_logprob",
    "logprobs",
    "prompt_logprobs",
    "draft_stats",
}


def test_the_models_are_loaded(echo):
    assert echo.server.models() == [
        "chat",
        "chat_tokenizer",
        "detokenizer",
        "generate",
        "llm",
        "tokenizer",
    ]


def test_one_response_over_grpc(echo):
    (answer,) = ask(echo.grpc, request("generate", text("Hello, world")))
    assert set(answer) == ANSWER
    assert answer["text_output"] == "Hello, world"
    assert answer["finish_reason"] == "stop"
    assert answer["num_input_tokens"] == 3
    assert answer["logprobs"] == answer["prompt_logprobs"] == ""


def test_a_stream_over_grpc_adds_up(echo):
    prompt = "one two three four five six seven eight"
    answers = ask(echo.grpc, request("generate", text(prompt), STREAM))
    assert all(set(answer) == ANSWER for answer in answers)
    assert "".join(answer["text_output"] for answer in answers) == prompt
    assert [answer["finish_reason"] for answer in answers[:-1]] == [""] * (len(answers) - 1)
    assert answers[-1]["finish_reason"] == "stop"
    (whole,) = ask(echo.grpc, request("generate", text(prompt)))
    total = sum(answer["num_output_tokens"] for answer in answers)
    assert total == whole["num_output_tokens"]


def test_generate_over_http(echo):
    answer = generate(echo.http, "generate", text_input="Grüße aus Köln 🎉", max_tokens=50)
    assert answer["text_output"] == "Grüße aus Köln 🎉"
    assert answer["finish_reason"] == "stop"


def test_generate_stream_over_http(echo):
    events = generate_stream(echo.http, "generate", text_input="a b c d e f g 🎉🎉 h")
    assert "".join(event["text_output"] for event in events) == "a b c d e f g 🎉🎉 h"
    assert events[-1]["finish_reason"] == "stop"


def test_http_takes_integers_for_floats_and_members_of_parameters(echo):
    """As LiteLLM's triton provider sends it."""
    answer = generate(
        echo.http,
        "generate",
        text_input="x y z",
        temperature=0,
        top_p=1,
        parameters={"max_tokens": 2, "stop_words": [""], "bad_words": [""]},
        stream=False,
    )
    assert answer["num_output_tokens"] == 2
    assert answer["finish_reason"] == "length"


def test_request_parameters_are_options_and_tensors_take_precedence(echo):
    def num_tokens(*inputs, **parameters):
        message = request("generate", text("a b c d e f"), *inputs, parameters=parameters)
        return ask(echo.grpc, message)[-1]["num_output_tokens"]

    assert num_tokens(max_tokens=2) == num_tokens(max_tokens="2", priority=1, user="me") == 2
    assert num_tokens(tensor("max_tokens", "INT32", 3), max_tokens=2) == 3
    # Many tokens: those that wait for the sender are one response.
    long = {"stream": True, "max_tokens": 4000}
    streamed = request("generate", text("word " * 4000), parameters=long)
    assert len(ask(echo.grpc, streamed)) > 1
    for body in (
        {"min_tokens": 1, "stop": "c", "logprobs": 0},
        {"parameters": {"stop": "c", "logprobs": "0", "stream": False}},
    ):
        answer = generate(echo.http, "generate", text_input="a b c d", **body)
        assert (answer["text_output"], answer["finish_reason"]) == ("a b ", "stop")


def test_requests_of_benchmark_clients_are_accepted(echo):
    answer = generate(
        echo.http,
        "generate",
        text_input="x y z",
        accumulate_tokens=True,
        pad_id=0,
        end_id=2,
        min_length=5,
        max_tokens=5,
        ignore_eos=True,
        stream=False,
    )
    assert answer["num_output_tokens"] == 5
    answer = generate(
        echo.http,
        "generate",
        text_input="x y z",
        exclude_input_in_output=True,
        sampling_parameters='{"max_tokens": "6", "min_tokens": "6"}',
    )
    assert answer["num_output_tokens"] == 6


def test_the_prompt_can_lead_the_output(echo):
    answer = generate(echo.http, "generate", text_input="Köln 🎉", exclude_input_in_output=False)
    assert answer["text_output"] == "Köln 🎉Köln 🎉"
    inputs = (text("Köln 🎉"), STREAM, tensor("exclude_input_in_output", "BOOL", False))
    answers = ask(echo.grpc, request("generate", *inputs))
    assert "".join(answer["text_output"] for answer in answers) == "Köln 🎉Köln 🎉"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_is_never_shown(echo, stream):
    inputs = (text("one two END three"), tensor("stop_words", "BYTES", ["END"]))
    answers = ask(echo.grpc, request("generate", *inputs, tensor("stream", "BOOL", stream)))
    assert "".join(answer["text_output"] for answer in answers) == "one two "
    assert answers[-1]["finish_reason"] == "stop"


def test_several_stop_tokens(echo):
    ids = encoded(echo, text("a b c d e f g"))
    stops = tensor("stop_token_ids", "INT32", [ids[5], ids[3]])
    for inputs in (
        (stops,),
        (stops, tensor("ignore_eos", "BOOL", True)),
        (text(json.dumps({"stop_token_ids": [ids[5], ids[3]]}), "sampling_parameters"),),
    ):
        (answer,) = ask(echo.grpc, request("generate", text("a b c d e f g"), *inputs))
        assert (answer["text_output"], answer["finish_reason"]) == ("a b c", "stop")
    answer = generate(
        echo.http, "generate", text_input="a b c d e f g", stop_token_ids=[ids[5], ids[3]]
    )
    assert (answer["text_output"], answer["finish_reason"]) == ("a b c", "stop")


def test_as_many_tokens_as_the_context_allows(echo):
    ids = [5] * 8000
    answer = generate(echo.http, "generate", prompt_token_ids=ids, max_tokens=-1, ignore_eos=True)
    assert answer["num_output_tokens"] == echo.engine.welcome.max_model_len - len(ids)
    assert answer["finish_reason"] == "length"


def test_ids_in_and_ids_out(echo):
    ids = tensor("input_ids", "INT32", [10, 11, 12, 13])
    answers = ask(echo.grpc, request("llm", ids, tensor("max_tokens", "INT32", 4), STREAM))
    found = [answer["output_ids"] for answer in answers]
    flat = [id_ for part in found for id_ in (part if isinstance(part, list) else [part])]
    assert flat == [10, 11, 12, 13]
    assert answers[-1]["finish_reason"] == "length"


def test_a_response_has_only_the_requested_outputs(echo):
    message = request("generate", text("Hello"))
    message.outputs.add(name="text_output")
    assert ask(echo.grpc, message) == [{"text_output": "Hello"}]


def test_a_chat_goes_through_the_template(echo):
    messages = json.dumps([{"role": "user", "content": "Which way?"}])
    # The template's own end-of-turn tokens are in the prompt, and so in its echo.
    answer = generate(echo.http, "chat", messages=messages, max_tokens=40, ignore_eos=True)
    prompt = "system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face\n"
    assert answer["text_output"].startswith(prompt + "user\nWhich way?\nassistant\n")


def test_a_chat_s_last_message_is_continued(echo):
    messages = [
        {"role": "user", "content": "Which way?"},
        {"role": "assistant", "content": "The way is"},
    ]
    answer = generate(
        echo.http,
        "chat",
        messages=json.dumps(messages),
        continue_final_message=True,
        tools=json.dumps([{"type": "function", "function": {"name": "f"}}]),
        chat_template_kwargs='{"enable_thinking": false}',
        ignore_eos=True,
    )
    # The echo starts again where the prompt ends: no line break follows an end-of-turn token.
    assert "user\nWhich way?\nassistant\nThe way issystem\n" in answer["text_output"]


@pytest.mark.parametrize(
    ("inputs", "error"),
    [
        ({"tools": '[{"type": "function"}]'}, "tools[0]: function is missing"),
        ({"tools": "[" * 5000}, "tools: nested too deeply"),
        ({"chat_template_kwargs": '{"messages": 1}'}, "chat_template_kwargs: 'messages' is not"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt: cannot be combined with continue_final_message",
        ),
        ({"messages": "[" * 100_000}, "messages: nested too deeply"),
    ],
)
def test_a_chat_s_other_inputs_are_checked(echo, inputs, error):
    messages = json.dumps([{"role": "user", "content": "x"}])
    with pytest.raises(Refused, match=f"400: .*{re.escape(error)}"):
        generate(echo.http, "chat", **{"messages": messages, **inputs})


def test_a_prompt_of_ids_is_generated_from(echo):
    ids = encoded(echo, tensor("add_special_tokens", "BOOL", False), text("Grüße aus Köln 🎉"))
    answer = generate(echo.http, "generate", prompt_token_ids=ids)
    assert answer["text_output"] == "Grüße aus Köln 🎉"
    assert answer["num_input_tokens"] == len(ids)
    streamed = request("generate", tensor("prompt_token_ids", "INT32", ids), STREAM)
    answers = ask(echo.grpc, streamed)
    assert "".join(answer["text_output"] for answer in answers) == "Grüße aus Köln 🎉"


@pytest.mark.parametrize(
    ("inputs", "error"),
    [
        ({"prompt_token_ids": [49152]}, "prompt_token_ids: 49152 is not in the vocabulary"),
        ({"prompt_token_ids": [5] * 9000}, "prompt_token_ids: This model's maximum context length"),
        (
            {"prompt_token_ids": [5], "text_input": "x"},
            "prompt_token_ids: is set beside text_input; send one of them",
        ),
        ({"add_special_tokens": False}, "text_input: is missing"),
    ],
)
def test_a_prompt_of_ids_is_checked(echo, inputs, error):
    with pytest.raises(Refused, match=f"400: .*{re.escape(error)}"):
        generate(echo.http, "generate", **inputs)


def test_the_tokenizer_describes_the_model(echo):
    found = infer(echo, "tokenizer", tensor("describe", "BOOL", True))
    assert set(found) == {"description"}
    description = json.loads(found["description"])
    assert description["model"] == "SmolLM2-135M-Instruct"
    welcome = echo.engine.welcome
    assert description["max_model_len"] == welcome.max_model_len
    assert description["vocab_size"] == welcome.vocab_size
    assert "<|im_start|>" in description["special_tokens"]
    assert "messages" in description["chat_template"]


def test_the_detokenizer_takes_ids_by_themselves(echo):
    """Also while requests run; request id 0 is none of theirs."""
    ids = encoded(echo, text("Grüße aus Köln 🎉"))
    state = [len(ids), 0, 0, 1, 0, 0]
    with ThreadPoolExecutor() as pool:
        running = pool.submit(generate_stream, echo.http, "generate", text_input="word " * 200)
        found = infer(
            echo,
            "detokenizer",
            tensor("detokenize_ids", "INT32", ids, [1, len(ids)]),
            tensor("detokenize_state", "INT64", state, [1, len(state)]),
        )
        events = running.result()
    assert found["text_output"] == ["Grüße aus Köln 🎉"]
    assert "".join(event["text_output"] for event in events) == "word " * 200
    body = {
        "inputs": [
            {"name": "detokenize_ids", "datatype": "INT32", "shape": [1, len(ids)], "data": ids},
            {"name": "detokenize_state", "datatype": "INT64", "shape": [1, 6], "data": state},
        ]
    }
    status, answer = post(echo.http, "detokenizer", "infer", body)
    assert status == 200
    assert json.loads(answer)["outputs"][0]["data"] == ["Grüße aus Köln 🎉"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), "one two three"),
        ((tensor("skip_special_tokens", "BOOL", False),), "one two<|im_start|> three"),
        ((tensor("keep_special_tokens", "BYTES", "<|im_start|>"),), "one two<|im_start|> three"),
        ((tensor("keep_special_tokens", "BYTES", "<|im_end|>"),), "one two three"),
    ],
)
def test_special_tokens_stay_in_the_text_on_request(echo, options, expected):
    first, second, third = encoded(echo, text("one two three"))
    ids = [first, second, 1, third]
    prompt = tensor("prompt_token_ids", "INT32", ids, [len(ids)])
    answers = list(Stream(echo.grpc, request("generate", prompt, STREAM, *options)))
    assert "".join(answer["text_output"] for answer in answers) == expected


def test_special_tokens_of_a_chat_stay_in_the_text_on_request(echo):
    messages = json.dumps([{"role": "user", "content": "Hello"}])
    fields = {"messages": messages, "ignore_eos": True, "max_tokens": 40}
    kept = ["<|im_start|>"]
    found = generate(echo.http, "chat", **fields, keep_special_tokens=kept)["text_output"]
    assert "<|im_start|>user\nHello\n" in found
    assert found.replace(*kept, "") == generate(echo.http, "chat", **fields)["text_output"]


def infer(server, model, *inputs):
    """Outputs of a model that is not decoupled."""
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        return outputs(stub.ModelInfer(request(model, *inputs), timeout=60))


def encoded(server, *inputs):
    return infer(server, "tokenizer", *inputs)["input_ids"]


def test_the_small_model_writes_text(cpu):
    answer = generate(cpu.http, "generate", text_input=PROMPTS[0], max_tokens=3)
    assert answer["text_output"].startswith(" Paris")
    messages = json.dumps([{"role": "user", "content": "What is the capital of France?"}])
    answer = generate(cpu.http, "chat", messages=messages, max_tokens=20)
    assert "Paris" in answer["text_output"]
    assert answer["finish_reason"] == "stop"
    assert answer["cumulative_logprob"] < 0


def test_logprobs_come_with_their_tokens_streamed_or_whole(cpu):
    inputs = (
        text(PROMPTS[0]),
        tensor("max_tokens", "INT32", 6),
        tensor("num_logprobs", "INT32", 3),
    )
    (whole,) = ask(cpu.grpc, request("generate", *inputs))
    streamed = ask(cpu.grpc, request("generate", *inputs, STREAM))
    tokens = json.loads(whole["logprobs"])
    assert len(tokens) == whole["num_output_tokens"] == 6
    assert "".join(next(iter(token.values()))["decoded_token"] for token in tokens).startswith(
        whole["text_output"]
    )
    for token in tokens:
        places = [one["rank"] for one in token.values()]
        assert places == [1, 2, 3], "greedy: the token itself is the most_probable"
    total = sum(next(iter(token.values()))["logprob"] for token in tokens)
    assert total == pytest.approx(whole["cumulative_logprob"], abs=1e-3)
    joined = [token for answer in streamed for token in json.loads(answer["logprobs"])]
    assert [list(token) for token in joined] == [list(token) for token in tokens]


def test_an_echoed_prompt_comes_first_with_logprobs_like_the_output(cpu):
    inputs = (
        text(PROMPTS[0]),
        tensor("max_tokens", "INT32", 2),
        tensor("num_logprobs", "INT32", 1),
        tensor("echo", "BOOL", True),
    )
    (whole,) = ask(cpu.grpc, request("generate", *inputs))
    streamed = ask(cpu.grpc, request("generate", *inputs, STREAM))
    assert whole["text_output"].startswith(PROMPTS[0] + " Paris")
    assert "".join(answer["text_output"] for answer in streamed) == whole["text_output"]
    first, *others = json.loads(whole["prompt_logprobs"])
    assert first is None
    assert 1 + len(others) == whole["num_input_tokens"]
    named = [next(iter(token.values()))["decoded_token"] for token in others]
    assert PROMPTS[0].endswith("".join(named))
    joined = [
        token
        for answer in streamed
        for token in (json.loads(answer["prompt_logprobs"]) if answer["prompt_logprobs"] else [])
    ]
    assert joined[0] is None
    assert [list(token) for token in joined[1:]] == [list(token) for token in others]
    assert len(json.loads(whole["logprobs"])) == whole["num_output_tokens"] == 2


def test_a_prompt_is_scored_alone_over_grpc_and_http(cpu):
    """What an evaluation asks of its continuations: OpenAI's echo with max_tokens 0."""
    options = {"max_tokens": 0, "echo": True, "num_logprobs": 1}
    answer = generate(cpu.http, "generate", text_input=PROMPTS[0] + " Paris.", **options)
    assert answer["text_output"] == PROMPTS[0] + " Paris."
    assert answer["finish_reason"] == "length"
    assert answer["num_output_tokens"] == answer["cumulative_logprob"] == 0
    assert answer["logprobs"] == ""
    scores = json.loads(answer["prompt_logprobs"])
    assert len(scores) == answer["num_input_tokens"]
    paris = next(iter(scores[-2].values()))
    assert (paris["decoded_token"], paris["rank"]) == (" Paris", 1)
    dialect = tensor("sampling_parameters", "BYTES", '{"max_tokens": 0, "prompt_logprobs": 1}')
    (again,) = ask(cpu.grpc, request("generate", text(PROMPTS[0] + " Paris."), dialect))
    assert again["text_output"] == ""
    for one, other in zip(scores[1:], json.loads(again["prompt_logprobs"])[1:], strict=True):
        assert one.keys() == other.keys()
    cpu.wait_until_idle()


def test_biases_and_allowed_tokens_apply_to_sampling(cpu):
    (free,) = ask(
        cpu.grpc,
        request("generate", text(PROMPTS[0]), tensor("max_tokens", "INT32", 1), RETURN_LOG_PROBS),
    )
    ((most_probable,),) = json.loads(free["logprobs"])

    def first_token(*inputs):
        message = request(
            "generate",
            text(PROMPTS[0]),
            tensor("max_tokens", "INT32", 1),
            RETURN_LOG_PROBS,
            *inputs,
        )
        (answer,) = ask(cpu.grpc, message)
        ((token_id,),) = json.loads(answer["logprobs"])
        return token_id

    ids = tensor("logit_bias_ids", "INT32", [int(most_probable), 1234])
    assert first_token(ids, tensor("logit_bias_values", "FP32", [-100.0, 0.0])) != most_probable
    assert first_token(ids, tensor("logit_bias_values", "FP32", [0.0, 100.0])) == "1234"
    assert first_token(tensor("allowed_token_ids", "INT32", [77])) == "77"
    assert first_token() == most_probable


def test_greedy_text_is_the_same_streamed_batched_and_alone(cpu):
    inputs = (text(PROMPTS[1]), tensor("max_tokens", "INT32", 12))
    (alone,) = ask(cpu.grpc, request("generate", *inputs))
    with ThreadPoolExecutor(4) as pool:
        runs = pool.map(lambda _: ask(cpu.grpc, request("generate", *inputs, STREAM)), range(4))
        for answers in runs:
            found = "".join(answer["text_output"] for answer in answers)
            assert found == alone["text_output"]


def test_three_hundred_texts_over_64_streams_come_back_whole(echo):
    """Every script, emoji and combining mark, in order, whatever the coalescing."""
    results = {}

    def client(number):
        for index in range(number, len(TEXTS), 64):
            message = request("generate", text(TEXTS[index]), STREAM)
            answers = ask(echo.grpc, message)
            results[index] = "".join(answer["text_output"] for answer in answers)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wrong = [TEXTS[index] for index in range(len(TEXTS)) if results.get(index) != TEXTS[index]]
    assert wrong == []
    echo.wait_until_idle()


def test_long_streams_side_by_side_keep_their_order(echo):
    """2 000 tokens each: enough for thousands of responses of one detokenizer batch each."""
    prompts = [f"{number} apples and {number + 1} pears. " for number in range(16)]
    inputs = (STREAM, tensor("ignore_eos", "BOOL", True), tensor("max_tokens", "INT32", 2000))

    def client(prompt):
        return ask(echo.grpc, request("generate", text(prompt), *inputs))

    with ThreadPoolExecutor(16) as pool:
        for prompt, answers in zip(prompts, pool.map(client, prompts), strict=True):
            found = "".join(answer["text_output"] for answer in answers)
            assert found == (prompt * 1000)[: len(found)]
            assert sum(answer["num_output_tokens"] for answer in answers) == 2000
            assert answers[-1]["finish_reason"] == "length"


def test_a_unary_call_says_what_to_call_instead(echo):
    import grpc
    from tritonclient.grpc import service_pb2_grpc

    with grpc.insecure_channel(echo.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(request("generate", text("x")), timeout=60)
    assert "doesn't support models with decoupled transaction policy" in caught.value.details()


def test_a_stream_asked_of_generate_is_refused_by_the_server(cpu):
    """/generate takes exactly one response."""
    body = {"text_input": "a b c", "stream": True, "ignore_eos": True, "max_tokens": 20}
    _, reply = post(cpu.http, "generate", "generate", body)
    assert "generate expects model to produce exactly 1 response" in json.loads(reply)["error"]
    assert (
        generate(cpu.http, "generate", text_input="a b c", max_tokens=1)["num_output_tokens"] == 1
    )


def test_a_refused_stream_names_the_cause(echo):
    with pytest.raises(Refused, match="max_tokens: -2 is out of range"):
        list(Stream(echo.grpc, request("generate", text("x"), tensor("max_tokens", "INT32", -2))))
