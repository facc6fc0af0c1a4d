"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from inflight.door.gateway.directory import ServedModel
from inflight.door.gateway.gateway import Gateway
from inflight.door.gateway.generation import Call, Delta
from inflight.door.gateway.logprobs import Place, read
from inflight.door.gateway.openai import errors
from inflight.door.gateway.openai.chunks import DONE, Identity, UsageChunks, usage_of
from inflight.door.gateway.openai.fields import (
    Fields,
    Int32,
    names_of,
    parse,
    tensors_of,
)
from inflight.door.gateway.openai.logprobs import CompletionLogprobs, first_text
from inflight.door.gateway.problem import Problem
from inflight.door.gateway.reply import StreamedReply, WholeReply
from inflight.door.gateway.usage import Usage

MAX_PROMPTS = 256
_encode = msgspec.json.encode
_ALLOWED = "allowed: a string, token ids, or an array of strings or of arrays of token ids"


class CompletionRequest(Fields, kw_only=True):
    """A request.

    Attributes:
        prompt: a string, token ids, or several of either.
        echo: the prompt precedes the output.
        logprobs: report the log-probability of each token and of so many of the most probable ones.
        add_special_tokens: of a prompt in text.
    """

    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: Int32 | None = None
    add_special_tokens: bool | None = None


class Completions:
    """The route."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def respond(self, request: Request) -> Response:
        """Raises Problem, Refusal, InflightError."""
        gateway = self._gateway
        fields = await gateway.read_fields(request, CompletionRequest, parse)
        prompts = prompts_of(fields.prompt)
        served = await gateway.find(request, fields.model)
        model = _completion_model(served)
        shared = _tensors(fields, gateway.policy.default_completion_tokens)
        names = names_of(fields, "logprobs")
        calls = [Call(model, {**one, **shared}, names, fields.num_outputs) for one in prompts]
        stream = await gateway.generate(request, served, calls)
        num_choices = len(calls) * fields.num_outputs
        if fields.stream:
            events = CompletionEvents(fields, served.id, num_choices)
            return StreamedReply(stream, events, gateway.busy_poll)
        whole = CompletionResult(fields, served.id, num_choices)
        return WholeReply(stream, whole, gateway.busy_poll)


def _completion_model(served: ServedModel) -> str:
    model = served.member("generate")
    if model is None:
        raise Problem(
            f"model: {served.id} has no text completions; use /v1/chat/completions", param="model"
        )
    return model


def _tensors(fields: CompletionRequest, default_max_tokens: int) -> dict[str, Any]:
    max_tokens = default_max_tokens if fields.max_tokens is None else fields.max_tokens
    tensors = tensors_of(fields, max_tokens)
    if fields.echo:
        tensors["echo"] = True
    if fields.logprobs is not None:
        tensors["num_logprobs"] = fields.logprobs
    if fields.add_special_tokens is not None:
        tensors["add_special_tokens"] = fields.add_special_tokens
    return tensors


def prompts_of(prompt: str | list[Any]) -> list[dict[str, Any]]:
    """The tensors of each prompt. Raises Problem."""
    if isinstance(prompt, str) or (prompt and type(prompt[0]) is int):
        return [_prompt(prompt, "prompt")]
    if not 1 <= len(prompt) <= MAX_PROMPTS:
        raise Problem(
            f"prompt: has {len(prompt)} prompts; allowed: 1 to {MAX_PROMPTS}", param="prompt"
        )
    return [_prompt(one, f"prompt[{place}]") for place, one in enumerate(prompt)]


def _prompt(prompt: Any, where: str) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"text_input": prompt}
    if not isinstance(prompt, list) or not prompt or not all(type(one) is int for one in prompt):
        raise Problem(f"{where}: is not a prompt; {_ALLOWED}", param=where)
    if not 0 <= min(prompt) <= max(prompt) < 2**31:
        raise Problem(
            f"{where}: has a number that is not a token id; allowed: 0 or more", param=where
        )
    return {"prompt_token_ids": prompt}


class CompletionEvents:
    """The chunks of a streamed completion.

    Args:
        model: the id of the model.
        num_choices: of all prompts.
    """

    def __init__(self, fields: CompletionRequest, model: str, num_choices: int) -> None:
        self._identity = Identity("cmpl", "text_completion", model)
        self._usage = UsageChunks(fields.num_outputs, fields.includes_usage, fields.continues_usage)
        head = self._identity.head
        self._heads = [b'%s{"index":%d,"text":' % (head, i) for i in range(num_choices)]
        self._logprobs = [_Logprobs(fields) for _ in range(num_choices)]

    def feed(self, deltas: list[Delta]) -> bytes:
        parts = []
        for delta in deltas:
            self._usage.add(delta)
            logprobs = self._logprobs[delta.index]
            logprobs.add(delta)
            if delta.text_output or logprobs.has_more:
                parts.append(self._chunk(delta.index, _encode(delta.text_output)))
            if delta.finish_reason:
                parts.append(self._chunk(delta.index, b'""', _encode(delta.finish_reason)))
        return b"".join(parts)

    def finish(self) -> bytes:
        return self._usage.last(self._identity) + DONE

    def error(self, problem: Problem) -> bytes:
        return errors.event_of(problem)

    def _chunk(self, index: int, text: bytes, finish_reason: bytes = b"null") -> bytes:
        logprobs = self._logprobs[index]
        return b'%s%s,"logprobs":%s,"finish_reason":%s}%s' % (
            self._heads[index],
            text,
            _encode(logprobs.take()) if logprobs.has_more else b"null",
            finish_reason,
            self._usage.closing,
        )


class _Logprobs:
    """Of one choice: those of its prompt, if it is echoed, and of its tokens."""

    def __init__(self, fields: CompletionRequest) -> None:
        self._echoes = bool(fields.echo)
        self._format = CompletionLogprobs(fields.logprobs or 0)
        self._prompt: list[Place | None] = []
        self._places: list[Place | None] = []
        self._first = ""

    @property
    def has_more(self) -> bool:
        return bool(self._places)

    def add(self, delta: Delta) -> None:
        if self._echoes and delta.prompt_logprobs:
            self._prompt += read(delta.prompt_logprobs)
        if delta.text_output and self._prompt:  # the echo comes with the first text
            self._first = first_text(self._prompt, delta.text_output)
            self._places += self._prompt
            self._prompt = []
        self._places += read(delta.logprobs)

    def take(self) -> dict[str, Any]:
        """OpenAI's object for all tokens since the last call."""
        places, self._places = self._places, []
        return self._format.part(places, self._first)


class CompletionResult:
    """Completions that are complete."""

    def __init__(self, fields: CompletionRequest, model: str, num_choices: int) -> None:
        self._identity = Identity("cmpl", "text_completion", model)
        self._usage = Usage(fields.num_outputs)
        self._texts: list[list[str]] = [[] for _ in range(num_choices)]
        self._finish_reasons = [""] * num_choices
        self._logprobs = [_Logprobs(fields) for _ in range(num_choices)]
        self._has_logprobs = fields.logprobs is not None

    def feed(self, deltas: list[Delta]) -> None:
        self._usage.add(deltas)
        for delta in deltas:
            self._texts[delta.index].append(delta.text_output)
            self._finish_reasons[delta.index] = delta.finish_reason
            self._logprobs[delta.index].add(delta)

    def result(self) -> bytes:
        choices = [
            {
                "index": index,
                "text": "".join(texts),
                "logprobs": self._logprobs[index].take() if self._has_logprobs else None,
                "finish_reason": self._finish_reasons[index],
            }
            for index, texts in enumerate(self._texts)
        ]
        return _encode(
            {**self._identity.members, "choices": choices, "usage": usage_of(self._usage)}
        )
