"""What a server says about itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import fake_triton
from fake_triton import two_words
from inflight_client import ConnectionFailed, InvalidRequest, Model, ModelMetadata, TensorMetadata

Use = Callable[..., Any]


def test_liveness_and_readiness_are_queried_from_the_server(use: Use) -> None:
    with fake_triton.serve(two_words) as server:
        assert use(server.url, lambda client: client.is_live()) is True
        assert use(server.url, lambda client: client.is_ready()) is True
    with pytest.raises(ConnectionFailed, match="it must be gRPC's host:port"):
        use(server.url, lambda client: client.is_ready(), timeout=60)


def test_model_readiness_is_queried_by_name(use: Use) -> None:
    with fake_triton.serve(two_words) as server:
        assert use(server.url, lambda client: client.is_model_ready("chat")) is True
        assert use(server.url, lambda client: client.is_model_ready("nope")) is False


def test_models_are_listed_with_their_versions(use: Use) -> None:
    with fake_triton.serve(two_words) as server:
        server.models = ("nope", "llm", "generate")
        assert use(server.url, lambda client: client.models()) == [
            Model("generate", (1,), True),
            Model("llm", (1,), True),
            Model("nope", (), False),
        ]


def test_a_server_that_closes_its_index_is_asked_for_known_models(use: Use) -> None:
    with fake_triton.serve(two_words) as server:
        server.models = ("generate", "llm", "nope", "mine", "other")
        server.has_index = False
        found = use(server.url, lambda client: client.models(), generate_model="mine")
    assert found == [
        Model("generate", (1, 2), True),
        Model("llm", (1, 2), True),
        Model("mine", (1, 2), True),
    ]


def test_metadata_has_the_inputs_and_outputs(use: Use) -> None:
    with fake_triton.serve(two_words) as server:
        found = use(server.url, lambda client: client.model_metadata("generate"))
        with pytest.raises(InvalidRequest, match="unknown model"):
            use(server.url, lambda client: client.model_metadata("nope"))
    inputs = (TensorMetadata("text_input", "BYTES", (1,)),)
    outputs = (TensorMetadata("text_output", "BYTES", (-1,)),)
    assert found == ModelMetadata("generate", (1, 2), "ensemble", inputs, outputs)
