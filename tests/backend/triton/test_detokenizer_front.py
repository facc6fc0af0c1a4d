"""Ids are detokenized in any batch and order, and deliveries are reported to the engine."""

import random
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import triton_python_backend_utils as pb_utils
from inflight.core.request import FinishReason, TokenEvent
from inflight.errors import CapacityError
from inflight.ipc.frames import Loading
from inflight.triton import detokenizer, protocol
from inflight.triton.detokenizer import DeliveryReports, DetokenizerFront
from inflight.triton.sibling import load_tokenizer
from texts import TEXTS
from waiting import PATIENCE_S, wait_until

REPOSITORY = Path(__file__).parents[3] / "model_repository"


class FakeClient:
    def __init__(self, on_lost):
        self.on_lost = on_lost
        self.welcome = SimpleNamespace(vocab_size=49152)
        self.frames = []
        self.cancelled = []
        self.closed = False

    def delivered(self, progress):
        self.frames.append(progress)

    def cancel(self, request_id):
        self.cancelled.append(request_id)

    def close(self):
        self.closed = True


@pytest.fixture
def clients(monkeypatch):
    """Attached clients, newest last; an engine is there from the second attempt on."""
    attached = []
    attempts = []

    def attach(path, role, on_lost, on_loading):
        assert role == "detokenizer"
        attempts.append(path)
        if len(attempts) == 1:
            raise CapacityError("no engine is listening")
        attached.append(FakeClient(on_lost))
        return attached[-1]

    monkeypatch.setattr(detokenizer, "attach", attach)
    monkeypatch.setattr(detokenizer, "ATTACH_PAUSE_S", 0.005)
    return attached


@pytest.fixture
def front(clients):
    front = DetokenizerFront(REPOSITORY / "detokenizer", {"llm": "llm"})
    yield front
    front.finalize()


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(REPOSITORY / "llm")


def request(event, echo=(), kept=()):
    """As it arrives: a batch of one, because the model takes batches."""
    arrays = protocol.outputs([protocol.OutputDelta(0, event, list(echo))], 3, kept=kept)
    return pb_utils.InferenceRequest(
        {name: arrays[name][None] for name in ("detokenize_ids", "detokenize_state")}
    )


def texts_of(responses):
    assert [response.error() for response in responses] == [None] * len(responses)
    assert all(response.tensors["text_output"].shape == (1, 1) for response in responses)
    return [response.tensors["text_output"][0, 0].decode() for response in responses]


def test_any_split_of_any_text_adds_up_in_any_order(front, tokenizer):
    """The responses of all streams in one shuffled batch: nothing depends on what came before."""
    rng = random.Random(7)
    parts = []
    for number, text in enumerate(TEXTS):
        ids = tokenizer.encode(text)
        start = 0
        while start < len(ids):
            end = min(len(ids), start + rng.randint(1, 4))
            window = front._detokenizer.window_for(ids, start)
            reason = FinishReason.STOP if end == len(ids) else None
            event = TokenEvent(number, ids[start:end], window, end, finish_reason=reason)
            parts.append((number, event))
            start = end
    order = list(range(len(parts)))
    rng.shuffle(order)
    shuffled = texts_of(front.execute([request(parts[i][1]) for i in order]))
    pieces = dict(zip(order, shuffled, strict=True))
    for number, text in enumerate(TEXTS):
        found = "".join(pieces[i] for i, part in enumerate(parts) if part[0] == number)
        assert found == text


def test_text_cut_by_a_stop_string_is_trimmed(front, tokenizer):
    event = TokenEvent(1, tokenizer.encode("one two END"), [], 3, 4, FinishReason.STOP)
    assert texts_of(front.execute([request(event)])) == ["one two"]


def test_a_response_without_new_ids_has_no_text(front):
    event = TokenEvent(1, [], [], 3, finish_reason=FinishReason.CANCELLED)
    assert texts_of(front.execute([request(event)])) == [""]


def test_the_engine_hears_once_per_batch(front, clients):
    wait_until(lambda: front._reports._clients)
    front.execute([request(TokenEvent(7, [5], [], 1)), request(TokenEvent(8, [5, 6], [], 9))])
    assert clients[0].frames == [[(7, 1), (8, 9)]]


def test_ids_without_a_request_are_text_and_no_delivery(front, clients, tokenizer):
    wait_until(lambda: front._reports._clients)
    ids = tokenizer.encode("Grüße 🎉")
    alone = pb_utils.InferenceRequest(
        {
            "detokenize_ids": np.array([ids], np.int32),
            "detokenize_state": np.array([[len(ids), 0, 0, 1, 0, 0]]),
        }
    )
    alone.cancelled = True
    assert texts_of(front.execute([alone, request(TokenEvent(7, [5], [], 1))]))[0] == "Grüße 🎉"
    assert clients[0].frames == [[(7, 1)]]
    assert clients[0].cancelled == []


def test_special_tokens_that_are_marked_stay_in_the_text(front, clients, tokenizer):
    wait_until(lambda: front._reports._clients)
    start = next(id_ for id_, text in tokenizer.special_ids.items() if text == "<|im_start|>")
    event = TokenEvent(7, [*tokenizer.encode("a"), start], [], 2)
    (text,) = texts_of(front.execute([request(event, kept={start})]))
    assert text == "a<|im_start|>"
    assert texts_of(front.execute([request(event)])) == ["a"]
    assert clients[0].frames == [[(7, 2)]] * 2


def test_the_engine_hears_of_a_cancel(front, clients):
    wait_until(lambda: front._reports._clients)
    gone = request(TokenEvent(7, [5], [], 1))
    gone.cancelled = True
    front.execute([gone, request(TokenEvent(8, [5], [], 1))])
    assert clients[0].cancelled == [7]


def test_a_fast_stream_is_not_polled_every_time(front, clients):
    wait_until(lambda: front._reports._clients)
    asked = [request(TokenEvent(7, [5], [], n)) for n in range(1, 50)]
    front.execute(asked)
    assert sum(one.num_questions for one in asked) == 1


@pytest.mark.alone
def test_polling_takes_at_most_a_tenth_of_the_time(front, clients):
    wait_until(lambda: front._reports._clients)
    streams = [request(TokenEvent(number, [5], [], 1)) for number in range(200)]
    for one in streams:
        one.answer_takes = 0.001
    started = time.monotonic()
    front.execute(streams)
    elapsed = time.monotonic() - started
    asked = sum(one.num_questions for one in streams)
    assert 1 <= asked <= 1 + elapsed / 0.01


def test_a_new_engine_is_found(front, clients):
    wait_until(lambda: front._reports._clients)
    clients[0].on_lost()
    wait_until(lambda: len(clients) == 2 and front._reports._clients == (clients[1],))
    front.execute([request(TokenEvent(7, [5], [], 1))])
    assert clients[1].frames == [[(7, 1)]]
    assert clients[0].frames == []


def test_both_engines_hear_while_one_replaces_the_other(clients, monkeypatch):
    """A stream goes on with the engine on which it began."""
    sockets = [Path("first.sock")]
    monkeypatch.setattr(detokenizer, "engine_sockets", lambda llm, owner_pid: sockets)
    reports = DeliveryReports(REPOSITORY / "llm")
    wait_until(lambda: len(reports._clients) == 1)
    sockets.append(Path("second.sock"))
    wait_until(lambda: len(reports._clients) == 2)
    reports.send([(7, 1)])
    reports.cancel(8)
    assert [(one.frames, one.cancelled) for one in clients] == [([[(7, 1)]], [8])] * 2
    clients[0].on_lost()
    del sockets[0]
    wait_until(lambda: reports._clients == (clients[1],))
    reports.close()
    reports._thread.join(PATIENCE_S)
    assert not reports._thread.is_alive()


def test_a_detokenizer_that_is_loaded_under_streams_misses_no_delivery(monkeypatch):
    """It is attached before it gets its first response: a stream waits for the acknowledgement."""
    attached = []

    def attach(path, role, on_lost, on_loading):
        time.sleep(0.05)
        attached.append(FakeClient(on_lost))
        return attached[-1]

    monkeypatch.setattr(detokenizer, "attach", attach)
    monkeypatch.setattr(detokenizer, "FIRST_ATTACH_S", PATIENCE_S)
    reports = DeliveryReports(REPOSITORY / "llm")
    reports.send([(7, 1)])
    assert [one.frames for one in attached] == [[[(7, 1)]]]
    reports.close()


def test_a_detokenizer_does_not_wait_for_an_engine_that_loads(monkeypatch):
    monkeypatch.setattr(detokenizer, "FIRST_ATTACH_S", PATIENCE_S)
    ended = threading.Event()

    def attach(path, role, on_lost, on_loading):
        on_loading(Loading("weights", 0.5))
        ended.wait(2 * PATIENCE_S)
        raise CapacityError("no engine is listening")

    monkeypatch.setattr(detokenizer, "attach", attach)
    started = time.monotonic()
    reports = DeliveryReports(REPOSITORY / "llm")
    assert time.monotonic() - started < detokenizer.FIRST_ATTACH_S / 2
    ended.set()
    reports.close()


def test_closing_ends_the_attachment(clients):
    reports = DeliveryReports(REPOSITORY / "llm")
    wait_until(lambda: reports._clients)
    reports.close()
    reports._thread.join(PATIENCE_S)
    assert clients[0].closed
    assert not reports._thread.is_alive()


def test_an_error_that_the_llm_leaves_to_it_is_its_answer(front, clients, tokenizer):
    arrays = protocol.failure(CapacityError("the engine exited; retry"))
    failed = pb_utils.InferenceRequest({name: array[None] for name, array in arrays.items()})
    fine, nothing = front.execute([request(TokenEvent(1, tokenizer.encode("fine"), [], 1)), failed])
    assert fine.error() is None
    assert nothing is None
    (response,) = failed.sender.wait()
    assert response.error().code() == pb_utils.TritonError.UNAVAILABLE
    assert response.error().message() == "the engine exited; retry"


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "detokenize_ids: is missing"),
        (
            {
                "detokenize_ids": np.zeros((1, 0), np.int32),
                "detokenize_state": np.zeros((1, 0), np.int64),
            },
            "detokenize_state: has 0 values; allowed: 6 for each output",
        ),
        (
            {
                "detokenize_ids": np.zeros((1, 0), np.int32),
                "detokenize_state": np.zeros((1, 0), np.int64),
                "detokenize_error": np.array([[b"{}"]], object),
            },
            "detokenize_error: is set only by the model llm; omit it",
        ),
        ({"detokenize_ids": np.zeros((1, 1), np.int32)}, "detokenize_state: is missing"),
        *(
            (
                {
                    "detokenize_ids": np.array([[wrong]], np.int32),
                    "detokenize_state": np.array([[1, 0, 0, 1, 1, 1]]),
                },
                f"detokenize_ids: {wrong} is not a token id of this model; allowed: 0 to 49151",
            )
            for wrong in (-1, 49152 - 2**31, 2**31 - 1)
        ),
        (
            {
                "detokenize_ids": np.zeros((1, 1), np.int32),
                "detokenize_state": np.array([[1, 2, 0, 0, 1, 1]]),
            },
            "detokenize_state: does not fit detokenize_ids",
        ),
        (
            {"detokenize_ids": np.zeros(1, np.int32), "detokenize_state": np.zeros((1, 6))},
            "detokenize_ids: has shape [1]; allowed: [1, N]",
        ),
    ],
)
def test_a_malformed_request_fails_alone(front, tokenizer, inputs, message):
    wait_until(lambda: front._reports.vocab_size == 49152)  # it has attached
    good = TokenEvent(1, tokenizer.encode("fine"), [], 1)
    bad = pb_utils.InferenceRequest(inputs)
    nothing, fine = front.execute([bad, request(good)])
    assert nothing is None
    (response,) = bad.sender.wait()
    assert response.error().code() == pb_utils.TritonError.INVALID_ARG
    assert response.error().message() == message
    assert fine.error() is None
