"""Several versions of a model side by side: which one answers, and how they come and go."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from changing_models import (
    STEP_MS,
    STREAMS,
    Streams,
    change,
    check_footprint,
    footprint,
    states,
)
from failpoint import failpoint
from inflight.errors import ConfigError
from inflight.ipc.control import LoadModel, UnloadModel
from inflight_client import Client
from kserve import Refused, ask, generate_stream, post, request, tensor, text
from supervised import Serving, serve, without_chat

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

NUM_BLOCKS = 256
ALL = "all {}"


def default_max_tokens(version: int) -> int:
    """By which the answers of a version are recognized."""
    return 2 + version


def write_version(models: Path, version: int) -> None:
    model = str(models.parent / "checkpoint")  # of `serve`
    engine = {"model": model, "device": "echo", "num_threads": 1}
    engine["num_blocks"] = NUM_BLOCKS
    folder = models / "llm" / str(version)
    folder.mkdir(exist_ok=True)
    engine["default_max_tokens"] = default_max_tokens(version)
    (folder / "engine.json").write_text(json.dumps(engine))


def write_policy(models: Path, policy: str) -> None:
    path = models / "llm" / "config.pbtxt"
    lines = [line for line in path.read_text().splitlines() if "version_policy" not in line]
    path.write_text("\n".join([*lines, f"version_policy {{ {policy} }}\n"]))


@contextlib.contextmanager
def serving_versions(
    folder: Path, policy: str, versions: tuple[int, ...], *arguments: str
) -> Iterator[Serving]:
    """A server with the ensemble `generate`, whose model has these versions."""

    def prepare(models: Path) -> None:
        without_chat(models)
        for version in versions:
            write_version(models, version)
        write_policy(models, policy)

    with (
        failpoint("slow", STEP_MS),
        serve(folder, "echo", *arguments, prepare=prepare) as serving,
    ):
        yield serving


# First: it has a server of its own, and the others share one.
def test_a_server_without_model_control_serves_its_policy(tmp_path: Path) -> None:
    policy = "latest { num_versions: 2 }"
    with serving_versions(tmp_path, policy, (1, 2, 3)) as server:
        found: dict[str, Any] = json.loads(call(server, "GET", "/v2/models/generate")[1])
        assert found["versions"] == ["2", "3"]
        assert [version_of(server, one) for one in ("2", "3", "")] == [2, 3, 3]
        assert post(server.http, "generate/versions/1", "generate", {"text_input": "x"})[0] == 404
        assert "generate, llm" in server.shown.read_text(), "names without versions"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """With model control, and at first the versions 1 and 2."""
    folder = tmp_path_factory.mktemp("versions")
    with serving_versions(folder, ALL, (1, 2), "--model-control") as found:
        yield found


@pytest.fixture
def serving(shared: Serving) -> Serving:
    """With the versions 1 and 2, whatever the test before has left."""
    folder = shared.models / "llm"
    loads = loaded(shared) != [1, 2] or any(
        one.num_blocks != NUM_BLOCKS for one in states(shared).values()
    )
    if loads or (folder / "3").exists():
        shutil.rmtree(folder / "3", ignore_errors=True)
        write_policy(shared.models, ALL)
        change(shared, LoadModel("llm"))
    assert loaded(shared) == [1, 2]
    return shared


def loaded(serving: Serving) -> list[int]:
    """The versions in the server's health; they are those that its doors use."""
    found = states(serving)
    ready = [int(one.version) for one in found.values() if one.state == "ready"]
    index = json.loads(call(serving, "POST", "/v2/repository/index")[1])
    assert sorted(int(one["version"]) for one in index if one["name"] == "generate") == ready
    return ready


def call(serving: Serving, method: str, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(serving.http, timeout=60)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def version_of(serving: Serving, version: str = "") -> int:
    """The version that answers a request on a gRPC stream."""
    inputs = [tensor("ignore_eos", "BOOL", True)]
    responses = ask(serving.grpc, request("generate", text("one"), *inputs, version=version))
    return sum(response["num_output_tokens"] for response in responses) - default_max_tokens(0)


def http_version_of(serving: Serving, version: str = "") -> int:
    """As `version_of`, over HTTP; the response names the model and the version."""
    model = f"generate/versions/{version}" if version else "generate"
    body = {"text_input": "one", "ignore_eos": True, "return_num_output_tokens": True}
    status, answer = post(serving.http, model, "generate", body)
    assert status == 200, answer
    found = json.loads(answer)
    number = int(found["num_output_tokens"]) - default_max_tokens(0)
    assert (found["model_name"], found["model_version"]) == ("generate", str(number))
    return number


def wait_until_unversioned_is(serving: Serving, version: int) -> None:
    serving.wait_until(lambda: version_of(serving) == version)


@contextlib.contextmanager
def streaming(serving: Serving, *versions: str) -> Iterator[list[Streams]]:
    """Streams of these versions, none of which may be lost."""
    found = [Streams(serving, "generate", version=version) for version in versions]
    try:
        for streams in found:
            streams.wait_until_ended(1)
        yield found
        for streams in found:
            streams.wait_until_ended(streams.num_ended + STREAMS)
    finally:
        for streams in found:
            streams.stop()
    assert [streams.errors for streams in found] == [[] for _ in found]


def test_two_versions_answer_at_the_same_time(serving: Serving) -> None:
    with streaming(serving, "1", "2"):
        for version in (1, 2):
            assert version_of(serving, str(version)) == version
            assert http_version_of(serving, str(version)) == version
            with Client(serving.grpc, version=version) as client:
                answer = client.generate("one", ignore_eos=True)
                assert answer.num_output_tokens == default_max_tokens(version)
        assert version_of(serving) == http_version_of(serving) == 2, "the highest"


def test_events_and_messages_name_the_model_and_the_version(serving: Serving) -> None:
    for path, version in (("generate", "2"), ("generate/versions/1", "1")):
        events = generate_stream(serving.http, path, text_input="a b c", max_tokens=3)
        assert {(one["model_name"], one["model_version"]) for one in events} == {
            ("generate", version)
        }
    with grpc.insecure_channel(serving.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for asked, version in (("", "2"), ("1", "1")):
            message = request("generate", text("one"), version=asked)
            for response in stub.ModelStreamInfer(iter([message]), timeout=60):
                found = response.infer_response
                assert (found.model_name, found.model_version) == ("generate", version)
            message = request("tokenizer", text("one"), version=asked)
            found = stub.ModelInfer(message, timeout=60)
            assert (found.model_name, found.model_version) == ("tokenizer", version)


def test_metadata_and_readiness_are_those_of_a_version(serving: Serving) -> None:
    for path in ("generate", "generate/versions/1", "llm/versions/2"):
        status, body = call(serving, "GET", f"/v2/models/{path}")
        found = json.loads(body)
        assert (status, found["name"]) == (200, path.partition("/")[0])
        assert found["versions"] == ["1", "2"]
        assert call(serving, "GET", f"/v2/models/{path}/ready")[0] == 200
        (stats,) = json.loads(call(serving, "GET", f"/v2/models/{path}/stats")[1])["model_stats"]
        assert (stats["name"], stats["version"]) == (
            path.partition("/")[0],
            path.rpartition("/")[2] if "/" in path else "2",
        )
    with grpc.insecure_channel(serving.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        found = stub.ModelMetadata(service_pb2.ModelMetadataRequest(name="generate", version="1"))
        assert (found.name, list(found.versions)) == ("generate", ["1", "2"])
        for version in ("", "1", "2"):
            about = service_pb2.ModelReadyRequest(name="generate", version=version)
            assert stub.ModelReady(about).ready
        config = stub.ModelConfig(service_pb2.ModelConfigRequest(name="llm")).config
        assert (config.name, config.backend) == ("llm", "inflight")
        index = stub.RepositoryIndex(service_pb2.RepositoryIndexRequest()).models
        assert [one.version for one in index if one.name == "llm"] == ["1", "2"]


def test_an_unknown_version_is_not_found(serving: Serving) -> None:
    words = "model generate has no version 7; allowed: 1, 2, or none for the highest"
    for route in ("", "/ready", "/config"):
        status, body = call(serving, "GET", f"/v2/models/generate/versions/7{route}")
        assert (status, words in body.decode()) == (404, True)
    for route in ("generate", "generate_stream"):
        status, answer = post(serving.http, "generate/versions/7", route, {"text_input": "x"})
        assert (status, words in answer) == (404, True)
    with pytest.raises(Refused, match=words):
        ask(serving.grpc, request("generate", text("x"), version="7"))
    with grpc.insecure_channel(serving.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        about = service_pb2.ModelReadyRequest(name="generate", version="7")
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelReady(about)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    status, _ = call(serving, "GET", "/v2/models/generate@1")
    assert status == 404, "Triton's names are not for clients"


def test_versions_come_and_go_under_streams_of_another(serving: Serving) -> None:
    footprints = []
    with streaming(serving, "1", ""):
        for _ in range(3):
            write_version(serving.models, 3)
            change(serving, LoadModel("llm"))
            assert loaded(serving) == [1, 2, 3]
            wait_until_unversioned_is(serving, 3)
            (status,) = change(serving, UnloadModel("llm@3")).models
            assert (status.name, status.version, status.state) == ("llm@3", "3", "unloaded")
            assert loaded(serving) == [1, 2]
            assert version_of(serving) == http_version_of(serving) == 2
            footprints.append(footprint(serving))
    check_footprint(footprints[1], footprints[-1])


def test_a_version_is_replaced_beside_another(serving: Serving) -> None:
    with streaming(serving, "1", "2"):
        change(serving, LoadModel("llm@1", {"num_blocks": 77}))
    assert {name: one.num_blocks for name, one in states(serving).items()} == {
        "llm@1": 77,
        "llm@2": NUM_BLOCKS,
    }
    with pytest.raises(ConfigError, match=r"cannot be overridden for all .* such as llm@2"):
        change(serving, LoadModel("llm", {"num_blocks": 78}))
    change(serving, LoadModel("llm@1"))
    assert states(serving)["llm@1"].num_blocks == NUM_BLOCKS


def test_a_load_makes_the_loaded_versions_those_of_the_policy(serving: Serving) -> None:
    """As they are in config.pbtxt now; streams of the former versions finish."""
    write_version(serving.models, 3)
    for policy, versions in (
        ("latest { num_versions: 2 }", [2, 3]),
        ("specific { versions: [ 1, 3 ] }", [1, 3]),
        ("latest { num_versions: 1 }", [3]),
    ):
        write_policy(serving.models, policy)
        with streaming(serving, ""):
            change(serving, LoadModel("llm"))
        assert loaded(serving) == versions
        wait_until_unversioned_is(serving, versions[-1])
    write_policy(serving.models, "specific { versions: [ 1, 4 ] }")
    with pytest.raises(ConfigError, match=r"model llm: .* version 4 does not exist; allowed: 1, 2"):
        change(serving, LoadModel("llm"))
    with pytest.raises(ConfigError, match="model llm has no version 9; allowed: 1, 2, 3"):
        change(serving, LoadModel("llm@9"))
    assert loaded(serving) == [3]
    change(serving, UnloadModel("llm"))
    with pytest.raises(Refused, match="no version of model generate is loaded"):
        version_of(serving)
    assert serving.health()[0] == 200


def test_a_killed_tritonserver_comes_back_with_the_same_versions(serving: Serving) -> None:
    write_version(serving.models, 3)
    change(serving, LoadModel("llm@3"))
    change(serving, UnloadModel("llm@2"))
    with serving.restarting("tritonserver"):
        os.kill(serving.pid_of("tritonserver"), signal.SIGKILL)
    assert loaded(serving) == [1, 3]
    assert (version_of(serving, "1"), version_of(serving)) == (1, 3)


def test_metrics_have_the_version(serving: Serving) -> None:
    for version in ("1", "2"):
        version_of(serving, version)
    text = urllib.request.urlopen(serving.engine_metrics).read().decode()
    lines = [one for one in text.splitlines() if one.startswith("inflight_generation_tokens_total")]
    labels = [(label in line) for line in lines for label in ('model="llm"', 'version="1"')]
    assert len(lines) >= 2 and labels.count(True) >= len(lines) + 1, lines
