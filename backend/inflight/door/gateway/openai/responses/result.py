"""The response: an object that is the same in all of its events but for status and output."""

from __future__ import annotations

import secrets
import time
from typing import Any

import msgspec

from inflight.door.gateway.generation import Delta
from inflight.door.gateway.openai.blocks import Block, Blocks, Kind
from inflight.door.gateway.openai.fields import FLEX
from inflight.door.gateway.openai.responses.fields import ResponsesRequest
from inflight.door.gateway.problem import Problem
from inflight.door.gateway.turns import AUTO, LENGTH, TurnPlan
from inflight.door.gateway.usage import Usage

COMPLETED, INCOMPLETE, IN_PROGRESS = "completed", "incomplete", "in_progress"
_PREFIXES = {Kind.TEXT: "msg", Kind.REASONING: "rs", Kind.CALL: "fc"}


class Response:
    """A response while it is generated.

    Args:
        model: the id of the model.
        plan: of the output.

    Attributes:
        blocks: of the output.
        usage: of the tokens.
    """

    def __init__(self, fields: ResponsesRequest, model: str, plan: TurnPlan) -> None:
        self._turn = plan.turn()
        self.blocks = Blocks(self._turn, num_logprobs=fields.num_logprobs)
        self.usage = Usage()
        self._head = {
            "id": f"resp_{secrets.token_hex(24)}",
            "object": "response",
            "created_at": int(time.time()),
        }
        self._tail = _echo(fields, model)

    @property
    def status(self) -> str:
        reason = self._turn.finish_reason
        if not reason:
            return IN_PROGRESS
        return INCOMPLETE if reason == LENGTH else COMPLETED

    def members(self, problem: Problem | None = None) -> dict[str, Any]:
        """The object, as it is now.

        Args:
            problem: at which it ended.
        """
        status = self.status if problem is None else "failed"
        has_ended = status != IN_PROGRESS
        is_cut = status == INCOMPLETE
        error = None
        if problem is not None:
            code = "server_error" if problem.status >= 500 else problem.code
            error = {"code": code, "message": problem.message}
        return {
            **self._head,
            "status": status,
            "completed_at": int(time.time()) if status == COMPLETED else None,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [item_of(one) for one in self.blocks.all] if has_ended else [],
            "usage": self._usage() if has_ended and problem is None else None,
            **self._tail,
        }

    def _usage(self) -> dict[str, Any]:
        counted = self.usage
        return {
            "input_tokens": counted.num_input_tokens,
            "input_tokens_details": {
                "cached_tokens": counted.num_cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": counted.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": self._turn.num_reasoning_tokens},
            "total_tokens": counted.num_input_tokens + counted.num_output_tokens,
        }


class ResponseResult:
    """A response that is complete."""

    def __init__(self, response: Response) -> None:
        self._response = response

    def feed(self, deltas: list[Delta]) -> None:
        self._response.usage.add(deltas)
        for delta in deltas:
            self._response.blocks.feed(delta)

    def result(self) -> bytes:
        return msgspec.json.encode(self._response.members())


def id_of(block: Block) -> str:
    """Of its item."""
    return f"{_PREFIXES[block.kind]}_{block.key}"


def part_of(block: Block, *, is_new: bool = False) -> dict[str, Any]:
    """The content of a message or of reasoning; is_new: without what it consists of."""
    text = "" if is_new else block.text
    if block.kind is Kind.REASONING:
        return {"type": "reasoning_text", "text": text}
    logprobs = [] if is_new else block.logprobs
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def item_of(block: Block, *, is_new: bool = False) -> dict[str, Any]:
    """The item of a block.

    Args:
        is_new: without what it consists of.
    """
    content = [] if is_new else [part_of(block)]
    status = COMPLETED if block.is_complete else INCOMPLETE
    head = {"id": id_of(block), "status": IN_PROGRESS if is_new else status}
    if block.kind is Kind.CALL:
        arguments = "" if is_new else block.text
        call = {"call_id": f"call_{block.key}", "name": block.name, "arguments": arguments}
        return {**head, "type": "function_call", **call}
    if block.kind is Kind.REASONING:
        return {**head, "type": "reasoning", "summary": [], "content": content}
    return {**head, "type": "message", "role": "assistant", "content": content}


def _echo(fields: ResponsesRequest, model: str) -> dict[str, Any]:
    """What a response shows of its request."""
    text, reasoning = fields.text, fields.reasoning
    shown: dict[str, Any] = {"format": {"type": "text"}}
    if text is not None and text.format is not None:
        given = msgspec.to_builtins(text.format)
        shown["format"] = {name: value for name, value in given.items() if value is not None}
    if text is not None and text.verbosity is not None:
        shown["verbosity"] = text.verbosity
    return {
        "background": False,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "max_tool_calls": None,
        "metadata": fields.metadata or {},
        "model": model,
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {
            "effort": reasoning.effort if reasoning is not None else None,
            "summary": reasoning.summary if reasoning is not None else None,
        },
        "service_tier": FLEX if fields.service_tier == FLEX else "default",
        "store": False,
        "temperature": 1.0 if fields.temperature is None else fields.temperature,
        "text": shown,
        "tool_choice": AUTO if fields.tool_choice is None else fields.tool_choice,
        "tools": fields.tools or [],
        "top_logprobs": fields.top_logprobs or 0,
        "top_p": 1.0 if fields.top_p is None else fields.top_p,
        "truncation": "disabled",
        "user": fields.user,
    }
