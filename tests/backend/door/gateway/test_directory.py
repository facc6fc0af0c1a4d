"""The models of a gateway, as servers and versions come and go."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway import MODELS, Gateway, a_gateway, delta, end
from inflight.door.gateway.directory import Description, Directory, ServedModel
from inflight.door.gateway.problem import Problem
from inflight.door.gateway.triton import Triton
from inflight.door.http.upstream import Upstream
from inflight.ipc.health import Health


class FakeTriton(Triton):
    """A server that is described by a table: the served name of each tokenizer."""

    def __init__(self, served: dict[str, str], *models: str) -> None:
        super().__init__(Upstream("127.0.0.1", 1), self)
        self.served = served
        self.found = Health(is_live=True, is_ready=True, models=list(models))
        self.num_described = 0

    def read(self) -> Health:
        return self.found

    async def infer(self, model: str, *_: Any) -> dict[str, list[Any]]:
        self.num_described += 1
        if model not in self.served:
            raise Problem("unexpected inference input 'describe'")
        return {"description": [msgspec.json.encode({"model": self.served[model]})]}


def ids(*tritons: FakeTriton) -> list[str]:
    return [one.id for one in asyncio.run(Directory(tritons).models())]


def find(name: str, *tritons: FakeTriton) -> ServedModel:
    return asyncio.run(Directory(tritons).find(name, lambda model: True))


def test_groups_with_one_name_are_told_apart_by_their_prefixes() -> None:
    models = ("one_generate", "one_tokenizer", "two_generate", "two_tokenizer", "generate")
    triton = FakeTriton({"one_tokenizer": "m", "two_tokenizer": "m"}, *models)
    assert ids(triton) == ["llm", "one/m", "two/m"]
    assert find("one/m", triton).member("generate") == "one_generate"
    assert find("two", triton).member("generate") == "two_generate"
    with pytest.raises(Problem) as error:
        find("m", triton)
    assert error.value.status == 404


def test_a_server_without_descriptions_has_tritons_names() -> None:
    triton = FakeTriton({}, "generate", "tokenizer", "one_chat")
    assert ids(triton) == ["llm", "one"]


def test_other_models_of_triton_are_none_of_the_gateway() -> None:
    triton = FakeTriton({}, "resnet", "my_chat_tokenizer", "detokenizer", "generate")
    assert ids(triton) == ["llm"]


def test_servers_with_one_model_share_its_requests() -> None:
    first, second = (FakeTriton({"tokenizer": "m"}, "generate", "tokenizer") for _ in range(2))
    model = find("m", first, second)
    assert model.tritons == (first, second)
    first.num_in_flight = 1
    assert model.choose() is second
    second.found = Health(is_live=True, is_ready=False, reason="drains")
    assert model.choose() is first
    first.found = second.found
    with pytest.raises(Problem) as error:
        model.choose()
    assert (error.value.status, error.value.message) == (503, "drains")


def test_a_model_that_is_loaded_is_found_at_once() -> None:
    async def load() -> None:
        triton = FakeTriton({}, "generate")
        directory = Directory([triton])
        assert [one.id for one in await directory.models()] == ["llm"]
        triton.found = Health(is_live=True, is_ready=True, models=["generate", "two_generate"])
        assert [one.id for one in await directory.models()] == ["llm", "two"]

    asyncio.run(load())


def test_models_are_described_once_in_a_while() -> None:
    async def ask() -> int:
        triton = FakeTriton({"tokenizer": "m"}, "generate", "tokenizer")
        directory = Directory([triton])
        for _ in range(10):
            await directory.models()
        return triton.num_described

    assert asyncio.run(ask()) == 1


def test_a_description_may_have_further_members() -> None:
    text = b'{"model": "m", "bos_token": null, "new": 1}'
    assert msgspec.json.decode(text, type=Description) == Description("m")


def test_a_request_goes_to_the_highest_version(tmp_path: Path) -> None:
    with a_gateway(tmp_path) as gateway:
        gateway.versions = {"generate": [1, 2]}
        gateway.set_ready(True)
        gateway.triton.plays(delta("x"), end())
        gateway.complete()
        assert gateway.triton.requests[0][0] == "generate@2"
        gateway.versions = {"generate": []}
        gateway.set_ready(True)
        status, error = gateway.error()
        assert (status, error["code"]) == (404, "model_not_found")


def test_unknown_fields_are_counted(tmp_path: Path) -> None:
    counts = tmp_path / "gateway.requests"
    with a_gateway(tmp_path, "--counts", str(counts)) as gateway:
        gateway.triton.plays(delta("x"), end())
        gateway.complete(no_such=1, nor_this=2, user="me")
        assert int.from_bytes((tmp_path / "gateway.ignored").read_bytes(), "little") == 2
        assert json.loads(gateway.ask("GET", "/v1/models")[2])["data"]


def test_the_models_of_the_fake_are_all_found(tmp_path: Path) -> None:
    def served(gateway: Gateway) -> set[str]:
        return {one["id"] for one in json.loads(gateway.ask("GET", "/v1/models")[2])["data"]}

    with a_gateway(tmp_path, models=MODELS[:6]) as gateway:
        assert served(gateway) == {"org/tiny-chat"}
