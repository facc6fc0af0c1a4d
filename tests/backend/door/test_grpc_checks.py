"""What the gRPC door lets through is what was sent; everything else is refused by name."""

import string

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import InferInput, InferRequestedOutput, service_pb2
from tritonclient.grpc._utils import _get_inference_request

import bad_grpc
from inflight.door.grpc import checks
from inflight.door.limits import Limits
from inflight.errors import InflightError
from kserve import request, tensor, text

LIMITS = Limits()
GOOD = request(
    "generate",
    text("Hello, wörld"),
    tensor("max_tokens", "INT32", 16),
    tensor("stream", "BOOL", True),
    tensor("temperature", "FP32", 0.5),
    tensor("stop_words", "BYTES", ["a", "", "bc"]),
    id="7",
    parameters={"timeout": 5, "custom": "x", "triton_enable_empty_final_response": True},
)


def parsed(data):
    """As the generated classes see it, without unknown fields."""
    message = service_pb2.ModelInferRequest.FromString(data)
    message.DiscardUnknownFields()
    return message


def passed(data):
    return checks.written(checks.infer_request(data, LIMITS))


@pytest.mark.parametrize("case", bad_grpc.CASES)
def test_bad_grpc(case):
    data, message = bad_grpc.CASES[case]
    with pytest.raises(InflightError) as caught:
        checks.infer_request(data, LIMITS)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_good_request_is_written_as_it_was():
    data = GOOD.SerializeToString()
    assert parsed(passed(data)) == GOOD


def test_typed_contents_are_written_as_they_were():
    message = service_pb2.ModelInferRequest(model_name="m")
    for name, datatype, field, values in (
        ("a", "INT32", "int_contents", [1, -2]),
        ("b", "BYTES", "bytes_contents", [b"\xff", b""]),
        ("c", "FP64", "fp64_contents", [0.5, 1e300]),
        ("d", "UINT8", "uint_contents", [0, 255]),
        ("e", "BOOL", "bool_contents", [True, False]),
    ):
        given_input = message.inputs.add(name=name, datatype=datatype, shape=[2])
        getattr(given_input.contents, field).extend(values)
    assert parsed(passed(message.SerializeToString())) == message


def test_what_tritonclient_sends_passes():
    import numpy as np

    prompt = InferInput("text_input", [1], "BYTES")
    prompt.set_data_from_numpy(np.array([b"hi"], dtype=np.object_))
    message = _get_inference_request(
        model_name="generate",
        inputs=[prompt],
        model_version="1",
        request_id="id 5",
        outputs=[InferRequestedOutput("text_output")],
        sequence_id=0,
        sequence_start=False,
        sequence_end=False,
        priority=3,
        timeout=1_000_000,
        parameters={"name": "x", "flag": True, "number": 1, "part": 0.5},
    )
    assert parsed(passed(message.SerializeToString())) == message


def test_unknown_fields_are_left_behind():
    data = GOOD.SerializeToString()
    assert parsed(passed(data + b"\xa2\x06\x05hello")) == parsed(passed(data))


def test_a_request_over_the_limit_is_refused_before_it_is_parsed():
    with pytest.raises(InflightError, match="allowed: up to 100"):
        checks.infer_request(GOOD.SerializeToString() * 2, Limits(max_body_bytes=100))


def accept_or_refuse(data):
    """Whatever passes reads as it did before, in another parser."""
    try:
        result = passed(data)
    except InflightError as error:
        assert str(error).isprintable()
        return
    assert parsed(result) == parsed(data)
    assert parsed(passed(result)) == parsed(result)  # maps are written in any order


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes_pass_unchanged_or_are_refused(data):
    accept_or_refuse(data)


@settings(max_examples=1500, deadline=None)
@given(st.data())
def test_mutated_requests_pass_unchanged_or_are_refused(data):
    message = bytearray(GOOD.SerializeToString())
    for _ in range(data.draw(st.integers(1, 6))):
        place = data.draw(st.integers(0, len(message)))
        match data.draw(st.sampled_from(["replace", "insert", "delete", "repeat"])):
            case "replace":
                message[place : place + 1] = data.draw(st.binary(min_size=1, max_size=2))
            case "insert":
                message[place:place] = data.draw(st.binary(min_size=1, max_size=12))
            case "delete":
                del message[place : place + data.draw(st.integers(1, 8))]
            case "repeat":
                message[place:place] = message[place : place + data.draw(st.integers(1, 80))]
    accept_or_refuse(bytes(message))


NAMES = st.text(string.ascii_letters, min_size=1, max_size=3)
VALUES = st.sampled_from(["INT32", "BYTES", "FP16", "BOOL", "XX"])


@settings(max_examples=800, deadline=None)
@given(
    st.lists(
        st.tuples(NAMES, VALUES, st.lists(st.integers(-1, 4), max_size=3), st.binary(max_size=24)),
        max_size=4,
    ),
    st.booleans(),
)
def test_made_up_requests_pass_unchanged_or_are_refused(inputs, with_outputs):
    message = request("generate", *inputs)
    if with_outputs:
        message.outputs.add(name="text_output")
    accept_or_refuse(message.SerializeToString())


@pytest.mark.parametrize(
    ("check", "good"),
    [
        (checks.model_request, service_pb2.ModelMetadataRequest(name="generate", version="1")),
        (checks.statistics_request, service_pb2.ModelStatisticsRequest()),
        (checks.empty_request, service_pb2.ServerMetadataRequest()),
    ],
)
def test_other_requests(check, good):
    assert type(good).FromString(check(good.SerializeToString())) == good
    with pytest.raises((InflightError, DecodeError)):
        check(b"\x0a\xff")


def test_a_models_name_cannot_be_a_path():
    bad = service_pb2.ModelMetadataRequest(name="../x")
    with pytest.raises(InflightError, match="model_name"):
        checks.model_request(bad.SerializeToString())
