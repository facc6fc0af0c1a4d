"""POST /tokenize and /detokenize, GET /tokenizer_info: vLLM's routes beside OpenAI's."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from inflight.door.gateway.directory import ServedModel, unknown_model
from inflight.door.gateway.gateway import Gateway
from inflight.door.gateway.openai.chat import chat_model
from inflight.door.gateway.openai.fields import FIELDS_OF_TENSORS, parse
from inflight.door.gateway.problem import Problem
from inflight.door.gateway.reply import json_response
from inflight.door.gateway.triton import flag, strings

TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
# The detokenizer reports nothing about it.
_NO_REQUEST = 0


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """A request: a prompt, or the messages of a chat.

    Attributes:
        model: by default the only one.
        return_token_strs: report the text of each token as well.
    """

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[TokenId]
    model: str | None = None


class TokenRoutes:
    """The routes."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def tokenize(self, request: Request) -> Response:
        """Raises Problem, Refusal, InflightError."""
        fields = await self._gateway.read_fields(request, TokenizeRequest, parse)
        if (fields.prompt is None) == (fields.messages is None):
            raise Problem("prompt: allowed: a prompt or messages, one of them", param="prompt")
        served = await self._model(request, fields.model)
        if fields.prompt is not None:
            role, inputs = "tokenizer", [strings("text_input", fields.prompt)]
            if fields.add_special_tokens is not None:
                inputs.append(flag("add_special_tokens", fields.add_special_tokens))
        else:
            chat_model(served)
            self._gateway.check_variables(served, fields.chat_template_kwargs)
            role, inputs = "chat_tokenizer", _chat_inputs(fields)
        values = await self._infer(served, role, inputs, "input_ids")
        tokens: list[int] = values
        texts = None
        if fields.return_token_strs:
            texts = [await self._text(served, [token]) for token in tokens]
        return json_response(
            {
                "count": len(tokens),
                "max_model_len": served.description.max_model_len,
                "tokens": tokens,
                "token_strs": texts,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        """Raises Problem, Refusal, InflightError."""
        fields = await self._gateway.read_fields(request, DetokenizeRequest, parse)
        served = await self._model(request, fields.model)
        text = await self._text(served, fields.tokens) if fields.tokens else ""
        return json_response({"prompt": text})

    async def info(self, request: Request) -> Response:
        """Raises Problem, InflightError."""
        served = await self._model(request, request.query_params.get("model"))
        found = served.description
        return json_response(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model": served.id,
                "model_max_length": found.max_model_len,
                "vocab_size": found.vocab_size,
                "bos_token": found.bos_token,
                "eos_token": found.eos_token,
                "additional_special_tokens": found.special_tokens,
                "chat_template": found.chat_template,
            }
        )

    async def _model(self, request: Request, name: str | None) -> ServedModel:
        """Admit a request to a model, by default the only one. Raises Problem, InflightError."""
        if name is None:
            allowed = await self._gateway.models(request)
            if len(allowed) != 1:
                names = ", ".join(one.id for one in allowed)
                raise unknown_model(f"model: is missing; allowed: {names}")
            served = allowed[0]
        else:
            served = await self._gateway.find(request, name)
        await self._gateway.admit(request, self._gateway.usable(request, served))
        return served

    async def _infer(
        self, served: ServedModel, role: str, inputs: list[dict[str, Any]], output: str
    ) -> list[Any]:
        model = served.member(role)
        if model is None:
            raise Problem(f"model: {served.id} has no {role}", param="model")
        values = await served.choose().infer(model, inputs, [output], FIELDS_OF_TENSORS)
        return values[output]

    async def _text(self, served: ServedModel, tokens: list[int]) -> str:
        state = [len(tokens), 0, 0, 1, _NO_REQUEST, 0]
        inputs = [_row("detokenize_ids", "INT32", tokens), _row("detokenize_state", "INT64", state)]
        found = await self._infer(served, "detokenizer", inputs, "text_output")
        return str(found[0])


def _chat_inputs(fields: TokenizeRequest) -> list[dict[str, Any]]:
    assert fields.messages is not None
    inputs = [strings("messages", msgspec.json.encode(fields.messages).decode())]
    for name in ("tools", "chat_template_kwargs"):
        value = getattr(fields, name)
        if value:
            inputs.append(strings(name, msgspec.json.encode(value).decode()))
    for name in ("add_generation_prompt", "continue_final_message"):
        value = getattr(fields, name)
        if value is not None:
            inputs.append(flag(name, value))
    return inputs


def _row(name: str, datatype: str, values: list[int]) -> dict[str, Any]:
    """A tensor of a batch of one."""
    return {"name": name, "shape": [1, len(values)], "datatype": datatype, "data": values}
