"""A chat of any wire format in OpenAI's terms: the request to Triton, and how it is split."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from inflight.door.gateway.directory import Description, ServedModel
from inflight.door.gateway.generation import Call
from inflight.door.gateway.openai.chat import chat_model
from inflight.door.gateway.openai.fields import Fields, StreamOptions, tensors_of
from inflight.door.gateway.parsers import reasoning_switches
from inflight.door.gateway.problem import Problem, of_request
from inflight.door.gateway.triton import flag, strings
from inflight.door.gateway.turns import Tooling, TurnPlan, plan_turns
from inflight.errors import RequestError

T = TypeVar("T")
Message = dict[str, Any]
_USAGE = StreamOptions(include_usage=True)


@dataclass(frozen=True, slots=True)
class Naming:
    """How errors call the fields of a wire format.

    Attributes:
        tensors: the field of each tensor, where the names differ.
        fields: patterns of OpenAI's fields at the start of an error, and their replacements.
    """

    tensors: Mapping[str, str]
    fields: Sequence[tuple[str, str]] = ()

    def apply(self, check: Callable[[], T]) -> T:
        """The result of a check. Raises Problem: its own, with the names of this format."""
        try:
            return check()
        except RequestError as error:
            problem = of_request(error)
        except Problem as error:
            problem = error
        raise Problem(
            self._renamed(problem.message),
            problem.status,
            param=problem.param and self._renamed(problem.param),
            code=problem.code,
            headers=problem.headers,
        )

    def _renamed(self, text: str) -> str:
        for pattern, name in self.fields:
            text = re.sub(pattern, name, text)
        return text


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat.

    Attributes:
        messages: OpenAI's.
        variables: of the chat template.
        is_continued: the output continues the last message.
    """

    messages: Sequence[Message]
    tooling: Tooling = field(default_factory=Tooling)
    variables: Mapping[str, Any] = field(default_factory=dict)
    is_continued: bool = False

    def plan(self, served: ServedModel, naming: Naming, has_guide: bool = False) -> TurnPlan:
        """Raises Problem. See `plan_turns`."""
        plan = naming.apply(
            lambda: plan_turns(
                served.description, self.tooling, self.variables, has_guide=has_guide
            )
        )
        return dataclasses.replace(plan, in_reasoning=False) if self.is_continued else plan

    def call(
        self, served: ServedModel, options: Fields, max_tokens: int, naming: Naming
    ) -> tuple[Call, TurnPlan]:
        """The request to the model's ensemble, and the plan of its output.

        Args:
            options: all but the prompt and tools.
            max_tokens: -1 for as many as the context allows.

        Raises:
            Problem: naming the field.
        """
        model = chat_model(served)
        usage = _USAGE if options.stream else None
        options = msgspec.structs.replace(options, stream_options=usage)
        tensors = naming.apply(lambda: tensors_of(options, max_tokens))
        plan = self.plan(served, naming, "guided_decoding_guide_type" in tensors)
        return Call(model, self._prompt() | tensors | plan.tensors, naming.tensors), plan

    async def count_tokens(self, served: ServedModel, naming: Naming) -> int:
        """Tokens of the prompt. Raises Problem."""
        chat_model(served)
        model = served.member("chat_tokenizer")
        if model is None:
            raise Problem(f"model: {served.id} has no chat_tokenizer", param="model")
        tensors = self._prompt()
        tools = self.plan(served, naming).tensors.get("tools")
        if tools is not None:
            tensors["tools"] = tools
        inputs = [
            flag(name, value) if isinstance(value, bool) else strings(name, value)
            for name, value in tensors.items()
        ]
        values = await served.choose().infer(model, inputs, ["input_ids"], dict(naming.tensors))
        return len(values["input_ids"])

    def _prompt(self) -> dict[str, Any]:
        tensors: dict[str, Any] = {"messages": _json(self.messages)}
        if self.variables:
            tensors["chat_template_kwargs"] = _json(self.variables)
        if self.is_continued:
            tensors |= {"add_generation_prompt": False, "continue_final_message": True}
        return tensors


def reasoning_variables(
    description: Description, is_on: bool | None, effort: str | None = None
) -> dict[str, Any]:
    """The variables by which a model's chat template switches reasoning.

    Args:
        is_on: None for the template's default.
        effort: how much of it; None for the template's default.
    """
    template = (description.chat_template or "") + (description.tool_chat_template or "")
    found: dict[str, Any] = {}
    if is_on is not None:
        found = dict.fromkeys(reasoning_switches(template), is_on)
    if effort is not None and re.search(r"\breasoning_effort\b", template):
        found["reasoning_effort"] = effort
    return found


def function_tool(tool: Mapping[str, Any], parameters: str) -> dict[str, Any]:
    """OpenAI's object of a tool whose members are not nested.

    Args:
        parameters: the name of the member that is their schema.
    """
    names = {"name": "name", "description": "description", parameters: "parameters"}
    names["strict"] = "strict"
    function = {
        to: tool[name] for name, to in names.items() if tool.get(name) is not None or name == "name"
    }
    return {"type": "function", "function": function}


def invalid(where: str, allowed: str) -> Problem:
    """A value of a field that is not allowed."""
    return Problem(f"{where}: allowed: {allowed}", param=where)


def not_supported(where: str, what: str, allowed: str) -> Problem:
    shown = what[:64] if what.isprintable() else "..."
    return Problem(
        f"{where}: {shown!r} is not supported; allowed: {allowed}",
        param=where,
        code="not_supported",
    )


def string_at(members: Mapping[str, Any], name: str, where: str) -> str:
    """A member that is a string. Raises Problem."""
    value = members.get(name)
    if not isinstance(value, str):
        raise invalid(f"{where}.{name}", "a string")
    return value


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
