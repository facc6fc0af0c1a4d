"""A message of Anthropic's API."""

from __future__ import annotations

import secrets
from typing import Any

import jiter
import msgspec

from inflight.door.gateway.generation import Delta
from inflight.door.gateway.openai.blocks import Block, Blocks, Change, Kind
from inflight.door.gateway.turns import LENGTH, STOP, TOOL_CALLS, TurnPlan
from inflight.door.gateway.usage import Usage

_REASONS = {STOP: "end_turn", LENGTH: "max_tokens", TOOL_CALLS: "tool_use"}


class _Stats(msgspec.Struct):
    stop_word: str | None = None


class MessageResponse:
    """A message while it is generated.

    Args:
        model: the id of the model.
        plan: of the output.
        shows_reasoning: the message has the reasoning.

    Attributes:
        blocks: of the output.
        usage: of the tokens.
    """

    def __init__(self, model: str, plan: TurnPlan, shows_reasoning: bool) -> None:
        self._turn = plan.turn()
        self._model = model
        self._id = f"msg_{secrets.token_hex(12)}"
        self.blocks = Blocks(self._turn, shows_reasoning)
        self.usage = Usage()
        self._stop_word: str | None = None

    def feed(self, deltas: list[Delta]) -> None:
        self.usage.add(deltas)
        for delta in deltas:
            self.advance(delta)

    def advance(self, delta: Delta) -> list[Change]:
        """What the next delta changes."""
        if delta.finish_reason == STOP and delta.draft_stats:
            self._stop_word = msgspec.json.decode(delta.draft_stats, type=_Stats).stop_word
        return self.blocks.feed(delta)

    def result(self) -> bytes:
        return msgspec.json.encode(self.members())

    def members(self) -> dict[str, Any]:
        """The message, as it is now."""
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [content_of(block) for block in self.blocks.all],
            **self.ending(),
            "usage": self.counts(),
        }

    def ending(self) -> dict[str, Any]:
        """Why it has ended; null until then."""
        reason = _REASONS.get(self._turn.finish_reason)
        if self._stop_word is not None and self._turn.finish_reason == STOP:
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": self._stop_word}

    def counts(self) -> dict[str, Any]:
        """The usage. Anthropic counts cached tokens apart from the others of the prompt."""
        usage = self.usage
        return {
            "input_tokens": usage.num_input_tokens - usage.num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.num_cached_tokens,
            "output_tokens": usage.num_output_tokens,
        }


def content_of(block: Block, *, is_new: bool = False) -> dict[str, Any]:
    """The content block.

    Args:
        is_new: without what it consists of.
    """
    text = "" if is_new else block.text
    if block.kind is Kind.TEXT:
        return {"type": "text", "text": text, "citations": None}
    if block.kind is Kind.REASONING:
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {
        "type": "tool_use",
        "id": f"toolu_{block.key}",
        "name": block.name,
        "input": _arguments(text),
    }


def _arguments(text: str) -> dict[str, Any]:
    """An object. Of arguments that were cut off, what is complete."""
    try:
        found = jiter.from_json(text.encode(), partial_mode=True) if text.strip() else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
