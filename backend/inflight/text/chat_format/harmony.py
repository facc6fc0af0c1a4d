"""Chats as the template of gpt-oss takes them, which shows less than a request may have.

several calls in a message      it writes the first one, and names each result after the last
                                call: so each call becomes a message, followed by its results
content and reasoning beside    an error; content alone is written as reasoning: so it becomes
a call                          the end of the reasoning
no content and no calls         an error: so the content becomes empty
a tool without a description    an error: so the description becomes empty
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from inflight.text.template import Conversation

_ANALYSIS = "<|channel|>analysis<|message|>"
_ONLY_CALLS = {"role": "assistant"}

_Message = dict[str, Any]


def is_written_by(template: str) -> bool:
    """Whether a chat template writes this format."""
    return _ANALYSIS in template


def fitted(conversation: Conversation, keep_last: bool = False) -> Conversation:
    """The conversation in a form that the template takes, with all of its texts.

    Args:
        keep_last: leave the last message as it is, since the output continues it.
    """
    given = conversation.messages
    last = given[-1:] if keep_last else []
    given = given[: len(given) - len(last)]
    messages: list[_Message] = []
    at = 0
    while at < len(given):
        message, at = given[at], at + 1
        if "tool_calls" not in message:
            messages.append({"content": "", **message})
            continue
        first = at
        while at < len(given) and given[at]["role"] == "tool":
            at += 1
        messages += _single_calls(_with_reasoning(message), given[first:at])
    tools = None if conversation.tools is None else [_described(one) for one in conversation.tools]
    return msgspec.structs.replace(conversation, messages=[*messages, *last], tools=tools)


def _with_reasoning(message: _Message) -> _Message:
    """A message with calls, its content at the end of its reasoning."""
    if not message.get("content") or not message.get("thinking"):
        return message
    thinking = f"{message['thinking']}\n{message['content']}"
    return {key: one for key, one in message.items() if key != "content"} | {"thinking": thinking}


def _single_calls(message: _Message, results: Sequence[_Message]) -> list[_Message]:
    """A message for each call, followed by its results; those of no call are at the end.

    Without ids, there is one result for each call, in their order.
    """
    has_ids = all("tool_call_id" in one for one in results)
    rest = list(results)
    found: list[_Message] = []
    for number, call in enumerate(message["tool_calls"]):
        if has_ids:
            own = [one for one in rest if one["tool_call_id"] == call.get("id")]
        else:
            own = rest[:1]
        rest = [one for one in rest if one not in own] if has_ids else rest[1:]
        found += [{**(message if number == 0 else _ONLY_CALLS), "tool_calls": [call]}, *own]
    return [*found, *rest]


def _described(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    if function.get("description") is not None:
        return tool
    return {**tool, "function": {**function, "description": ""}}
