"""Messages about a version over gRPC, under the model's name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from inflight.door.grpc import renamed
from inflight.errors import UnknownModel
from inflight.ipc.health import Health

VERSIONS = {"generate": [1, 2]}
HEALTH = Health(is_live=True, is_ready=True, models=["generate"], versions=VERSIONS)


def response(name: str, data: bytes, is_final: bool = False) -> Any:
    found = service_pb2.ModelInferResponse(model_name=name, model_version="2", id="7")
    found.parameters["triton_final_response"].bool_param = is_final
    found.outputs.add(name="text_output", datatype="BYTES", shape=[1])
    found.raw_output_contents.append(data)
    return found


@given(data=st.binary(), is_final=st.booleans())
def test_a_response_keeps_all_but_its_name(data: bytes, is_final: bool) -> None:
    sent = service_pb2.ModelStreamInferResponse(
        infer_response=response("generate@2", data, is_final)
    )
    passed = renamed.stream_response(sent.SerializeToString())
    sent.infer_response.model_name = "generate"
    assert service_pb2.ModelStreamInferResponse.FromString(passed) == sent
    unary = response("generate@2", data).SerializeToString()
    passed = renamed.unary_response("ModelInfer", unary, VERSIONS)
    assert service_pb2.ModelInferResponse.FromString(passed) == response("generate", data)


def test_an_error_stays_as_it_is() -> None:
    """The stream looks for errors by their first byte."""
    error = service_pb2.ModelStreamInferResponse(error_message="it failed")
    for has_response in (False, True):
        if has_response:
            error.infer_response.id = "7"
        passed = renamed.stream_response(error.SerializeToString())
        assert passed[:1] == b"\x0a"
        assert service_pb2.ModelStreamInferResponse.FromString(passed) == error


def test_descriptions_name_the_model_and_its_versions() -> None:
    metadata = service_pb2.ModelMetadataResponse(
        name="generate@2", versions=["2"], platform="ensemble"
    )
    passed = renamed.unary_response("ModelMetadata", metadata.SerializeToString(), VERSIONS)
    metadata.name, metadata.versions[:] = "generate", ["1", "2"]
    assert service_pb2.ModelMetadataResponse.FromString(passed) == metadata
    config = service_pb2.ModelConfigResponse()
    config.config.name, config.config.backend = "llm@2", "inflight"
    passed = renamed.unary_response("ModelConfig", config.SerializeToString(), VERSIONS)
    config.config.name = "llm"
    assert service_pb2.ModelConfigResponse.FromString(passed) == config
    stats = service_pb2.ModelStatisticsResponse()
    stats.model_stats.add(name="generate@2", version="2", inference_count=3)
    stats.model_stats.add(name="other", version="1")
    passed = renamed.unary_response("ModelStatistics", stats.SerializeToString(), VERSIONS)
    stats.model_stats[0].name = "generate"
    assert service_pb2.ModelStatisticsResponse.FromString(passed) == stats


def test_without_versions_and_for_other_methods_bytes_pass() -> None:
    assert renamed.unary_response("ModelInfer", b"\xff", {}) == b"\xff"
    assert renamed.unary_response("ServerMetadata", b"\xff", VERSIONS) == b"\xff"


def test_a_request_about_a_model_names_a_version_of_it() -> None:
    for version, name in (("", "generate@2"), ("1", "generate@1")):
        asked = service_pb2.ModelReadyRequest(name="generate", version=version)
        passed = renamed.name_request(HEALTH, asked.SerializeToString())
        asked.name = name
        assert service_pb2.ModelReadyRequest.FromString(passed) == asked
    asked = service_pb2.ModelReadyRequest(name="generate", version="3")
    with pytest.raises(UnknownModel, match="has no version 3; allowed: 1, 2"):
        renamed.name_request(HEALTH, asked.SerializeToString())
    for name in ("", "other"):
        data = service_pb2.ModelReadyRequest(name=name, version="3").SerializeToString()
        assert renamed.name_request(HEALTH, data) == data
