"""The llm front with a fake engine: each request ends once, whatever happens."""

import json
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import triton_python_backend_utils as pb_utils
from inflight.core.request import Candidate, FinishReason, TokenEvent
from inflight.errors import CapacityError, ConfigError, EngineError, RequestError
from inflight.ipc.frames import Welcome
from inflight.ipc.metrics import usage
from inflight.ipc.runtime_folder import folder_of
from inflight.ipc.sockets.disconnects import TICKET, DisconnectReporter
from inflight.triton import engine_front, errors, llm
from inflight.triton.contract import DETOKENIZE_ERROR, MODELS
from inflight.triton.protocol import read_error, write_error
from waiting import PATIENCE_S, wait_until

OUTPUTS = tuple(tensor.name for tensor in MODELS["llm"].outputs)


class FakeEngine:
    """What attach_front returns."""

    def __init__(self, number, on_events, on_lost, on_delivered):
        self.welcome = Welcome("fake", 100, 64, 8, 16, [2], 16, True)
        self.number = number
        self.on_events = on_events
        self.on_lost = on_lost
        self.on_delivered = on_delivered
        self.num_ids = 0
        self.submitted = []
        self.cancelled = []
        self.closed = False
        self.has_work = threading.Semaphore(0)

    def new_request_id(self):
        self.num_ids += 1
        return self.number << 32 | self.num_ids

    def submit(self, request):
        self.submitted.append(request)
        self.has_work.release()

    def cancel(self, request_id):
        self.cancelled.append(request_id)
        self.has_work.release()

    def wait_until_cancelled(self, *request_ids):
        """These, and no others."""
        wait_until(lambda: set(request_ids) <= set(self.cancelled))
        assert set(self.cancelled) == set(request_ids)

    def close(self):
        self.closed = True

    def say(self, ids, index=-1, **fields):
        request_id = self.submitted[index].request_id
        self.on_events([TokenEvent(request_id, ids, **fields)])


@pytest.fixture
def engines(monkeypatch):
    """The engines that were started, newest last; `engines.errors` makes the next starts fail."""

    class Engines(list):
        def __init__(self):
            super().__init__()
            self.errors = []
            self.started = threading.Semaphore(0)

    started = Engines()

    def attach_front(directory, owner, on_events, on_lost, on_delivered):
        if started.errors:
            raise started.errors.pop(0)
        started.append(FakeEngine(len(started) + 1, on_events, on_lost, on_delivered))
        started.started.release()
        return started[-1]

    monkeypatch.setattr(engine_front, "attach_front", attach_front)
    monkeypatch.setattr(engine_front, "RESTART_BACKOFF_S", (0.0, 0.01))
    return started


@pytest.fixture
def front(engines):
    front = llm.LlmFront(Path("/models/llm"), {"sender_threads": "2"})
    yield front
    front.finalize()


def ask(front, parameters=None, outputs=OUTPUTS, correlation_id=0, **inputs):
    inputs = {"input_ids": np.array([1, 2, 3], np.int32), **inputs}
    request = pb_utils.InferenceRequest(inputs, parameters, outputs, correlation_id)
    assert front.execute([request]) is None
    return request.sender


def true():
    return np.array([True])


def test_a_stream_is_sent_as_it_comes(front, engines):
    sender = ask(front, stream=true())
    engine = engines[0]
    engine.say([7], position=1)
    first = sender.wait_for(1)[0]
    assert first.tensors["output_ids"].tolist() == [7]
    assert first.tensors["finish_reason"].tolist() == [b""]
    engine.say([8, 9], position=3, finish_reason=FinishReason.STOP)
    last = sender.wait()[-1]
    assert last.tensors["output_ids"].tolist() == [8, 9]
    assert last.tensors["finish_reason"].tolist() == [b"stop"]
    assert last.tensors["num_input_tokens"].tolist() == [3]
    assert not front._in_flight


def test_without_a_stream_the_answer_is_one_response(front, engines):
    sender = ask(front)
    for position in range(1, 6):
        engines[0].say([position], position=position)
    engines[0].say([], position=5, trim=2, finish_reason=FinishReason.LENGTH)
    (response,) = sender.wait()
    assert response.tensors["output_ids"].tolist() == [1, 2, 3, 4, 5]
    assert response.tensors["num_output_tokens"].tolist() == [5]
    assert response.tensors["detokenize_state"].tolist()[:4] == [5, 0, 2, 1]


def two():
    return np.array([2], np.int32)


def test_several_outputs_are_requests_of_one_answer(front, engines):
    sender = ask(front, n=two())
    engine = engines[0]
    assert [one.sibling for one in engine.submitted] == [None, engine.submitted[0].request_id]
    engine.say([7, 8], index=1, position=2, finish_reason=FinishReason.STOP)
    engine.say([9], index=0, position=1, finish_reason=FinishReason.LENGTH)
    (response,) = sender.wait()
    assert response.tensors["index"].tolist() == [0, 1]
    assert response.tensors["output_ids"].tolist() == [9, 7, 8]
    assert response.tensors["num_output_tokens"].tolist() == [1, 2]
    assert response.tensors["finish_reason"].tolist() == [b"length", b"stop"]
    assert not front._in_flight


def test_a_beam_search_is_one_request_of_one_answer(front, engines):
    sender = ask(front, n=two(), beam_width=np.array([3], np.int32))
    engine = engines[0]
    (search,) = engine.submitted
    first, second = search.output_ids
    assert first == search.request_id
    best = TokenEvent(first, [7, 8], position=2, finish_reason=FinishReason.STOP)
    engine.on_events([TokenEvent(second, [9], position=1, finish_reason=FinishReason.LENGTH)])
    engine.on_events([best])
    (response,) = sender.wait()
    assert response.tensors["index"].tolist() == [0, 1]
    assert response.tensors["output_ids"].tolist() == [7, 8, 9]
    assert response.tensors["finish_reason"].tolist() == [b"stop", b"length"]
    assert not front._in_flight


def test_a_failed_beam_search_yields_one_response(front, engines):
    sender = ask(front, n=two(), beam_width=np.array([3], np.int32))
    engine = engines[0]
    engine.on_events([TokenEvent(engine.submitted[0].request_id, error_kind="engine", error="no")])
    (response,) = sender.wait()
    assert response.error is not None
    assert not front._in_flight


def test_several_outputs_stream_with_their_index(front, engines):
    sender = ask(front, n=two(), stream=true(), exclude_input_in_output=np.array([False]))
    engine = engines[0]
    engine.say([7], index=1, position=1)
    sender.wait_for(1)
    engine.say([8], index=1, position=2, finish_reason=FinishReason.STOP)
    engine.say([9], index=0, position=1, finish_reason=FinishReason.STOP)
    found = [
        (int(one.tensors["index"][0]), one.tensors["output_ids"].tolist()) for one in sender.wait()
    ]
    assert found == [(1, [1, 2, 3, 7]), (1, [8]), (0, [1, 2, 3, 9])]


def test_the_failure_of_one_output_ends_the_others(front, engines):
    sender = ask(front, n=two())
    engine = engines[0]
    first, second = (one.request_id for one in engine.submitted)
    engine.on_events([TokenEvent.failed(second, EngineError("broken"))])
    (response,) = sender.wait()
    assert "broken" in response.error().message()
    assert first in engine.cancelled
    assert not front._in_flight


def test_all_other_request_options_reach_the_engine(front, engines):
    ask(
        front,
        speculation=np.array([b"3"], object),
        guided_decoding_guide_type=np.array([b"choice"], object),
        guided_decoding_guide=np.array([b'["a", "b"]'], object),
    )
    (submitted,) = engines[0].submitted
    assert submitted.speculation == 3
    assert submitted.structured.choices() == ["a", "b"]


def test_the_prompt_is_echoed_once(front, engines):
    sender = ask(front, stream=true(), exclude_input_in_output=np.array([False]))
    engines[0].say([7], position=1)
    sender.wait_for(1)
    engines[0].say([8], position=2, finish_reason=FinishReason.STOP)
    ids = [response.tensors["output_ids"].tolist() for response in sender.wait()]
    assert ids == [[1, 2, 3, 7], [8]]


PROMPT = [[], [Candidate(2, -0.5, 1, "b")], [Candidate(3, -1.5, 2, "c")]]


def prompt_token_ids(response):
    (text,) = response.tensors["prompt_logprobs"]
    return [one and int(next(iter(one))) for one in json.loads(text)] if text else []


def test_prompt_logprobs_stream_with_the_echoed_prompt_first(front, engines):
    inputs = {"echo": true(), "num_prompt_logprobs": np.array([0], np.int32)}
    sender = ask(front, stream=true(), **inputs)
    engines[0].say([], position=0, window=[3], prompt_candidates=PROMPT[:2])
    first = sender.wait_for(1)[0]
    assert first.tensors["output_ids"].tolist() == [1, 2, 3]
    assert first.tensors["num_output_tokens"].tolist() == [0]
    assert prompt_token_ids(first) == [None, 2]
    engines[0].say(
        [7], position=1, window=[3], prompt_candidates=PROMPT[2:], finish_reason=FinishReason.STOP
    )
    last = sender.wait()[-1]
    assert last.tensors["output_ids"].tolist() == [7]
    assert prompt_token_ids(last) == [3]


def test_a_request_without_output_tokens_gets_a_response(front, engines):
    inputs = {"echo": true(), "num_logprobs": np.array([0], np.int32)}
    sender = ask(front, max_tokens=np.array([0], np.int32), **inputs)
    (submitted,) = engines[0].submitted
    assert (submitted.params.max_tokens, submitted.params.num_prompt_logprobs) == (0, 0)
    engines[0].say([], position=0, window=[3], prompt_candidates=PROMPT[:2])
    engines[0].say([], prompt_candidates=PROMPT[2:], finish_reason=FinishReason.LENGTH)
    (response,) = sender.wait()
    assert response.tensors["output_ids"].tolist() == [1, 2, 3]
    assert response.tensors["finish_reason"].tolist() == [b"length"]
    assert prompt_token_ids(response) == [None, 2, 3]


def test_prompt_logprobs_are_reported_even_if_their_output_is_not_returned(front, engines):
    inputs = {"best_of": two(), "num_prompt_logprobs": np.array([0], np.int32)}
    sender = ask(front, **inputs)
    first, second = engines[0].submitted
    assert first.params.num_prompt_logprobs == 0
    assert second.params.num_prompt_logprobs is None
    ends = {"position": 1, "finish_reason": FinishReason.STOP}
    engines[0].say([7], index=0, cumulative_logprob=-5.0, prompt_candidates=PROMPT, **ends)
    engines[0].say([8], index=1, cumulative_logprob=-1.0, **ends)
    (response,) = sender.wait()
    assert response.tensors["output_ids"].tolist() == [8]
    assert prompt_token_ids(response) == [None, 2, 3]


def test_only_wanted_outputs_are_sent(front, engines):
    sender = ask(front, outputs=("output_ids", "finish_reason"))
    engines[0].say([7], position=1, finish_reason=FinishReason.STOP)
    (response,) = sender.wait()
    assert set(response.tensors) == {"output_ids", "finish_reason"}


def test_a_bad_request_ends_alone(front, engines):
    good = ask(front)
    bad = ask(front, top_p=np.array([7], np.float32))
    (response,) = bad.wait()
    assert response.error().code() == pb_utils.TritonError.INVALID_ARG
    assert response.error().message().startswith("top_p: 7.0 is out of range")
    assert len(engines[0].submitted) == 1
    engines[0].say([7], position=1, finish_reason=FinishReason.STOP)
    assert good.wait()[0].error() is None


EMPTY = RequestError("is empty; allowed: at least one character", "text_input")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EMPTY, "INVALID_ARG"),
        (EngineError("the prompt could not be tokenized"), "UNAVAILABLE"),
        (ConfigError("chat template: line 1: unexpected end"), "INTERNAL"),
    ],
)
def test_a_prompt_rejected_by_the_tokenizer_fails_with_its_error(front, engines, error, code):
    nothing = np.array([], np.int32)
    (response,) = ask(front, input_ids=nothing, prompt_error=write_error(error)).wait()
    assert response.error().code() == getattr(pb_utils.TritonError, code)
    assert response.error().message() == str(error)
    assert engines[0].submitted == []


def test_the_tokenizers_error_comes_before_all_others(front, engines, monkeypatch):
    monkeypatch.setattr(engine_front, "RESTART_BACKOFF_S", (60.0,))
    engines[0].on_lost()
    (response,) = ask(
        front,
        {"temprature": 1},
        correlation_id=7,
        top_p=np.array([7], np.float32),
        nonsense=np.array([1]),
        prompt_error=write_error(EMPTY),
    ).wait()
    assert response.error().message() == str(EMPTY)


def test_a_client_cannot_make_an_error_up(front, engines):
    (response,) = ask(front, prompt_error=np.array([b'{"kind": "x"}'], object)).wait()
    assert response.error().code() == pb_utils.TritonError.INVALID_ARG
    assert response.error().message().startswith("prompt_error: is set only by the tokenizers")
    assert engines[0].submitted == []


def test_no_error_is_sent_too_soon_after_its_request(front, engines, monkeypatch):
    """Triton 2.51 can crash on one that does."""
    monkeypatch.setattr(errors, "EARLIEST_ERROR_S", 0.3)
    asked = [time.monotonic()]
    senders = [ask(front, correlation_id=7)]
    asked.append(time.monotonic())
    senders.append(ask(front))
    failed = TokenEvent.failed(
        engines[0].submitted[0].request_id, CapacityError("the queue is full")
    )
    engines[0].on_events([failed])
    asked.append(time.monotonic())
    senders.append(ask(front))
    engines[0].on_lost()
    for sender, at in zip(senders, asked, strict=True):
        (response,) = sender.wait()
        assert response.error() is not None
        assert sender.sent_at[0] - at >= 0.3


def test_a_late_error_is_sent_immediately(front, engines):
    sender = ask(front)
    time.sleep(errors.EARLIEST_ERROR_S)
    error = EngineError("the step failed")
    engines[0].on_events([TokenEvent.failed(engines[0].submitted[0].request_id, error)])
    assert front._errors._waiting.empty()
    assert sender.wait()[0].error().message() == "the step failed"


def test_a_request_that_cannot_be_read_is_answered(front, caplog):
    class Broken(pb_utils.InferenceRequest):
        def inputs(self):
            raise pb_utils.TritonModelException("Unexpected shared memory at 0x7f00")

    request = Broken({}, outputs=OUTPUTS)
    front.execute([request])
    (response,) = request.sender.wait()
    assert response.error().message() == "the request could not be read"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RequestError("no", "input_ids"), "INVALID_ARG"),
        (CapacityError("full"), "UNAVAILABLE"),
        (EngineError("the step failed"), "UNAVAILABLE"),
        (ConfigError("odd"), "INTERNAL"),
    ],
)
def test_an_engines_error_keeps_its_kind_and_text(front, engines, error, code):
    sender = ask(front, stream=true())
    engines[0].on_events([TokenEvent.failed(engines[0].submitted[0].request_id, error)])
    (response,) = sender.wait()
    assert response.error().code() == getattr(pb_utils.TritonError, code)
    assert response.error().message() == str(error)


def test_a_cancelled_request_is_cancelled_in_the_engine(front, engines):
    sender = ask(front, stream=true())
    other = ask(front, stream=true())
    sender.cancelled = True
    engine = engines[0]
    for _ in range(3):
        assert engine.has_work.acquire(timeout=PATIENCE_S)
    assert set(engine.cancelled) == {engine.submitted[0].request_id}
    engine.say([], index=0, position=0, finish_reason=FinishReason.CANCELLED)
    assert sender.wait()[-1].tensors["finish_reason"].tolist() == [b"cancelled"]
    assert not other.closed.is_set()


def test_a_detokenized_request_is_not_asked_for_its_cancellation(front, engines):
    """An ensemble's cancellation never shows in a step that runs."""
    sender = ask(front, stream=true(), prompt_tensor=np.array([b"text_input"], object))
    sender.cancelled = True
    assert not threading.Event().wait(5 * engine_front.CANCEL_INTERVAL_S)
    assert engines[0].cancelled == []
    assert engines[0].submitted[0].acknowledged


def test_a_closed_sender_is_never_touched_again(front, engines):
    """Triton has freed the memory behind it: reading it could crash the server."""
    senders = []
    for _ in range(300):
        senders.append(ask(front, stream=true()))
        engines[0].say([1], position=1)
        engines[0].say([2], position=2, finish_reason=FinishReason.STOP)
    for sender in senders:
        sender.wait()
    assert not threading.Event().wait(3 * engine_front.CANCEL_INTERVAL_S)
    assert [sender.misuses for sender in senders] == [[]] * 300


def test_a_response_that_cannot_be_sent_ends_the_request(front, engines, caplog):
    sender = ask(front, stream=true())
    sender.failures = 1
    engines[0].say([7], position=1)
    (response,) = sender.wait()
    assert response.error().message() == "the response could not be sent"
    assert engines[0].cancelled == [engines[0].submitted[0].request_id]
    engines[0].say([8], position=2, finish_reason=FinishReason.CANCELLED)
    assert len(sender.responses) == 1
    assert sender.misuses == []


def test_a_lost_engine_ends_each_request_with_one_error(front, engines):
    senders = [ask(front, stream=true()) for _ in range(20)]
    engines[0].say([7], position=1)
    senders[-1].wait_for(1)
    engines[0].on_lost()
    for sender in senders:
        error = sender.wait()[-1].error()
        assert error.code() == pb_utils.TritonError.UNAVAILABLE
        assert error.message() == "the engine exited while it processed this request; retry it"
        assert sender.misuses == []


def test_a_lost_engine_is_started_again(front, engines):
    engines.started.acquire(timeout=PATIENCE_S)
    engines.errors.append(EngineError("it did not come up"))
    engines[0].on_lost()
    assert engines.started.acquire(timeout=PATIENCE_S)
    wait_until(lambda: front._client is engines[1])
    sender = ask(front)
    engines[1].say([7], position=1, finish_reason=FinishReason.STOP)
    assert sender.wait()[0].error() is None


def test_without_an_engine_requests_are_refused_at_once(front, engines, monkeypatch):
    monkeypatch.setattr(engine_front, "RESTART_BACKOFF_S", (60.0,))
    engines[0].on_lost()
    (response,) = ask(front).wait()
    assert response.error().code() == pb_utils.TritonError.UNAVAILABLE
    assert "restarting" in response.error().message()


def test_late_events_of_a_lost_engine_are_ignored(front, engines):
    sender = ask(front, stream=true())
    engines[0].on_lost()
    sender.wait()
    engines[0].say([7], position=1)
    engines[0].on_lost()
    assert len(sender.responses) == 1


def detokenized(front, outputs=OUTPUTS):
    """A stream as an ensemble asks for it."""
    prompt_tensor = np.array([b"text_input"], object)
    return ask(front, stream=true(), outputs=outputs, prompt_tensor=prompt_tensor)


def fail(engine, error):
    engine.on_events([TokenEvent.failed(engine.submitted[0].request_id, error)])


def test_a_detokenized_stream_that_has_begun_fails_by_its_detokenizer(front, engines):
    """A step of an ensemble that fails beside another one leaks the request in Triton 2.51."""
    sender = detokenized(front)
    engines[0].say([7], position=1)
    sender.wait_for(1)
    fail(engines[0], CapacityError("x"))
    last = sender.wait()[-1]
    assert last.error() is None
    assert set(last.tensors) == {"detokenize_ids", "detokenize_state", "detokenize_error"}
    assert last.tensors["detokenize_ids"].size == last.tensors["detokenize_state"].size == 0
    error = read_error(DETOKENIZE_ERROR, last.tensors["detokenize_error"])
    assert (type(error), str(error)) == (CapacityError, "x")
    assert len(sender.responses) == 2
    assert sender.misuses == []


def test_a_detokenized_stream_without_a_response_fails_at_once(front, engines):
    sender = detokenized(front)
    fail(engines[0], EngineError("x"))
    (response,) = sender.wait()
    assert response.error().message() == "x"


def test_an_error_keeps_its_distance_in_an_ensemble_that_does_not_map_it(front, engines):
    sender = detokenized(front, tuple(name for name in OUTPUTS if name != DETOKENIZE_ERROR.name))
    engines[0].say([7], position=1)
    sender.wait_for(1)
    fail(engines[0], EngineError("x"))
    assert sender.wait()[-1].error().message() == "x"
    first, last = sender.sent_at
    assert last - first > engine_front.ERROR_DELAY_S * 0.8


def test_finalize_ends_what_is_in_flight(engines):
    front = llm.LlmFront(Path("/models/llm"), {})
    sender = ask(front, stream=true())
    front.finalize()
    assert sender.wait()[-1].error().code() == pb_utils.TritonError.UNAVAILABLE
    assert engines[0].closed


def test_an_engine_that_cannot_load_is_reported(engines):
    engines.errors.append(ConfigError("block_size: 0 is out of range"))
    with pytest.raises(ConfigError, match="block_size"):
        llm.LlmFront(Path("/models/llm"), {})


@pytest.mark.parametrize("text", ["0", "65", "many", "-1", "1.5"])
def test_sender_threads_is_checked(engines, text):
    with pytest.raises(ConfigError, match=r"sender_threads is .*; allowed: 1 to 64"):
        llm.LlmFront(Path("/models/llm"), {"sender_threads": text})


def test_the_timeout_of_unwatched_requests_is_checked(engines):
    with pytest.raises(ConfigError, match=r"unwatched_timeout_s is '0'; allowed: 1 to 1000000"):
        llm.LlmFront(Path("/models/llm"), {"unwatched_timeout_s": "0"})


# ---------------------------------------------------------------- clients that have left


def test_requests_of_a_disconnected_client_are_cancelled(front, engines):
    senders = [ask(front, {TICKET: ticket}) for ticket in ("a", "b", "a")]
    DisconnectReporter(folder_of(front._owner.pid)).report("a")
    first, _, third = engines[0].submitted
    engines[0].wait_until_cancelled(first.request_id, third.request_id)
    for place, reason in enumerate([FinishReason.CANCELLED, FinishReason.STOP] * 2):
        if place < 3:
            engines[0].say([7], place, position=1, finish_reason=reason)
            assert len(senders[place].wait()) == 1


def test_a_disconnect_may_be_reported_before_the_request_arrives(front, engines):
    DisconnectReporter(folder_of(front._owner.pid)).report("early")
    wait_until(lambda: front._disconnects.has_left("early"))
    ask(front, {TICKET: "early"})
    ask(front, {TICKET: "late"})
    assert engines[0].cancelled == [engines[0].submitted[0].request_id]


def test_a_request_whose_client_cannot_be_watched_has_a_deadline(front, engines, monkeypatch):
    """Without a door, an ensemble's request without a stream would outlive its client."""
    monkeypatch.setattr(front, "_unwatched_timeout_s", 0)
    prompt = np.array([b"text_input"], object)
    ask(front, {TICKET: "a"}, prompt_tensor=prompt)
    ask(front, prompt_tensor=prompt, stream=true())
    ask(front, prompt_tensor=prompt)
    engines[0].wait_until_cancelled(engines[0].submitted[2].request_id)


# ---------------------------------------------------------------- accounts


@pytest.fixture
def usages(tmp_path, monkeypatch):
    """What the fronts made after it report to the accountant."""
    monkeypatch.setattr(engine_front, "folder_of", lambda pid: tmp_path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(usage.usage_path(tmp_path)))
        receiver.settimeout(PATIENCE_S)
        yield receiver


def test_an_account_is_charged_for_prompt_and_outputs(usages, engines, front):
    sender = ask(front, {usage.ACCOUNT: "acme/1"}, n=np.array([2], np.int32))
    for index in (0, 1):
        reason = FinishReason.STOP if index == 0 else FinishReason.CANCELLED
        engines[0].say([7, 8], index, position=2 + index, finish_reason=reason)
    sender.wait()
    found = []
    while sum(one.num_output_tokens for one in found) < 5:
        found += usage.decode(usages.recv(1 << 16))
    assert {one.account for one in found} == {"acme/1"}
    assert sum(one.num_prompt_tokens for one in found) == 3
    assert sum(one.num_output_tokens for one in found) == 5


def test_a_tenant_shares_prefixes_only_with_itself(engines, front):
    ask(front, {usage.ACCOUNT: "acme/1"})
    ask(front, {usage.ACCOUNT: "acme/2"})
    ask(front, {usage.ACCOUNT: "other/1"}, cache_salt=np.array([b"acme"], object))
    ask(front, cache_salt=np.array([b"acme"], object))
    ask(front)
    salts = [request.cache_salt for request in engines[0].submitted]
    assert salts == ["acme\0", "acme\0", "other\0acme", "acme", ""]
    tenants = [request.tenant for request in engines[0].submitted]
    assert tenants == ["acme", "acme", "other", "acme", ""]


def test_without_an_account_nothing_is_reported(usages, engines, front):
    sender = ask(front)
    engines[0].say([7], position=1, finish_reason=FinishReason.STOP)
    sender.wait()
    usages.settimeout(0.5)
    with pytest.raises(TimeoutError):
        usages.recv(1)


def test_a_refused_request_is_not_charged(usages, engines, front):
    sender = ask(front, {usage.ACCOUNT: "acme/1", "top_kk": 5})
    assert "top_kk" in sender.wait()[-1].error().message()
    usages.settimeout(0.5)
    with pytest.raises(TimeoutError):
        usages.recv(1)
