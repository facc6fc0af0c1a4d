"""Which layout a client uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest

import fake_triton
from fake_triton import NATIVE_MODELS, failing, two_words
from inflight_client import Client, InvalidRequest

Use = Callable[..., Any]
MESSAGES = [{"role": "user", "content": "Hi"}]
TENSORRT_LLM = ("ensemble", "postprocessing", "preprocessing", "tensorrt_llm", "tensorrt_llm_bls")


@pytest.mark.parametrize("has_index", [True, False], ids=["index", "probes"])
@pytest.mark.parametrize(
    ("models", "model"),
    [
        (NATIVE_MODELS, "generate"),
        (TENSORRT_LLM, "ensemble"),
        (("tensorrt_llm", "tensorrt_llm_bls"), "tensorrt_llm_bls"),
        (("vllm_model",), "vllm_model"),
    ],
)
def test_the_layout_follows_from_the_models(
    use: Use, models: tuple[str, ...], model: str, has_index: bool
) -> None:
    with fake_triton.serve(two_words) as server:
        server.models = models
        server.has_index = has_index

        def action(client: Any) -> Any:
            return client.generate("Hi", max_tokens=4)

        assert use(server.url, action, layout=None).text == "Hello wörld"
        (call,) = server.calls
    assert call.request.model_name == model


def test_a_model_that_is_named_stays_so(use: Use) -> None:
    with fake_triton.serve(two_words) as server:
        server.models = (*TENSORRT_LLM, "mine")
        use(
            server.url,
            lambda client: client.generate("Hi", max_tokens=4),
            layout=None,
            generate_model="mine",
        )
        assert server.calls[0].request.model_name == "mine"
        assert server.calls[0].input("text_input")[1] == [1, 1]


def test_the_layout_is_found_once() -> None:
    with fake_triton.serve(two_words) as server, Client(server.url, layout=None) as client:
        client.generate("Hi")
        server.models = ("vllm_model",)
        client.generate("Hi")
        assert [call.request.model_name for call in server.calls] == ["generate", "generate"]


def test_a_server_of_another_kind_is_refused(use: Use) -> None:
    with fake_triton.serve(two_words) as server:
        server.models = ("resnet", "nope")
        with pytest.raises(
            InvalidRequest, match=r"none of the models .*; it has resnet; set layout"
        ):
            use(server.url, lambda client: client.stream("Hi").completion(), layout=None)


def test_a_chat_needs_a_chat_model(use: Use) -> None:
    for layout in ("tensorrtllm", "vllm"):
        with pytest.raises(InvalidRequest, match=f"chat: the layout {layout} has no model for mes"):
            use("127.0.0.1:1", lambda client: client.chat(MESSAGES), layout=layout)


def test_a_chat_model_beside_another_layout_is_used(use: Use) -> None:
    with fake_triton.serve(two_words) as server:
        server.models = (*TENSORRT_LLM, "chat", "mine")
        use(server.url, lambda client: client.chat(MESSAGES), layout=None)
        use(
            server.url,
            lambda client: client.chat(MESSAGES),
            layout="tensorrtllm",
            chat_model="mine",
        )
        assert [call.request.model_name for call in server.calls] == ["chat", "mine"]
        assert server.calls[0].input("messages")[1] == [1]


def test_an_unknown_layout_is_refused(use: Use) -> None:
    with pytest.raises(
        InvalidRequest, match="layout: is 'trt'; allowed: native, tensorrtllm, vllm"
    ):
        use("127.0.0.1:1", lambda client: client.is_ready(), layout="trt")


def test_a_request_that_is_invalid_is_refused_after_the_layout_is_found(use: Use) -> None:
    with fake_triton.serve(two_words) as server:
        server.models = ("vllm_model",)
        with pytest.raises(InvalidRequest, match="cache_salt: is not supported"):
            use(
                server.url,
                lambda client: client.generate("Hi", cache_salt="x"),
                layout=None,
            )
        assert server.calls == []


def test_requests_are_retried_after_detection(use: Use) -> None:
    script = failing(2, grpc.StatusCode.UNAVAILABLE, "the queue is full")
    with fake_triton.serve(script) as server:
        assert use(server.url, lambda client: client.generate("Hi"), layout=None).text
        assert len(server.calls) == 3
