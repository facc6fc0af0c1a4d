"""The models of the gateway: each is a group of Triton's models, on one or several servers."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from inflight.door.gateway.problem import MODEL_NOT_FOUND, Problem, of_refusal
from inflight.door.gateway.triton import Triton, flag
from inflight.door.http.refusal import unavailable
from inflight.errors import InflightError, did_you_mean

# A model that is replaced may have another description.
TTL_S = 5.0
DESCRIBE_TIMEOUT_S = 5.0
MAX_NAME = 256
# NAME_generate or generate; the longer suffixes first.
_MEMBER = re.compile(r"(?:(.+?)_)??(chat_tokenizer|tokenizer|detokenizer|generate|chat|llm)")
_ENGINE = "llm"


class Description(msgspec.Struct, frozen=True):
    """What the model `tokenizer` reports about itself.

    Attributes:
        model: the name under which it is served.
        max_model_len: tokens of prompt and output; None if it is not known.
        chat_template: None for none.
        tool_chat_template: of chats with tools, if it is another one.
    """

    model: str
    max_model_len: int | None = None
    vocab_size: int | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    chat_template: str | None = None
    tool_chat_template: str | None = None
    special_tokens: list[str] = []


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model of the gateway.

    Attributes:
        id: unique name.
        names: Triton's names of its models by their roles, such as `chat` and `generate`.
        tritons: the servers that have it.
        created: seconds since the epoch.
    """

    id: str
    group: str
    names: dict[str, str]
    description: Description
    tritons: tuple[Triton, ...]
    created: int

    def member(self, role: str) -> str | None:
        """Triton's name of the model with a role; None if there is none."""
        return self.names.get(role)

    def choose(self) -> Triton:
        """The server for the next request. Raises Problem: none is ready."""
        ready = [one for one in self.tritons if one.health.read().is_ready]
        if not ready:
            raise of_refusal(unavailable(self.tritons[0].health.read().reason))
        return min(ready, key=lambda one: one.num_in_flight)


class Directory:
    """Finds models by their ids, and by Triton's names of their members.

    What is known is renewed in the background, and at once if the servers' models change.
    """

    def __init__(self, tritons: Sequence[Triton]) -> None:
        self._tritons = tritons
        self._models: dict[str, ServedModel] = {}
        self._aliases: dict[str, ServedModel] = {}
        self._created: dict[str, int] = {}
        self._known: object = None
        self._descriptions: dict[tuple[int, str], Description] = {}
        self._renewed_at = -TTL_S
        self._renewing: asyncio.Task[None] | None = None

    async def models(self) -> list[ServedModel]:
        """All of them, in the order of their ids. Raises Problem: no server is ready."""
        await self._renew_if_due()
        return [self._models[name] for name in sorted(self._models)]

    async def find(self, name: str, can_use: Callable[[ServedModel], bool]) -> ServedModel:
        """A model that may be used; others are as if they did not exist.

        Raises:
            Problem: there is no such model, or no server is ready.
        """
        await self._renew_if_due()
        found = self._models.get(name) or self._aliases.get(name)
        if found is None or not can_use(found):
            shown = name if len(name) <= MAX_NAME and name.isprintable() else "..."
            allowed = [one.id for one in self._models.values() if can_use(one)]
            hint = did_you_mean(shown, allowed) or f"; allowed: {', '.join(allowed)}"
            raise unknown_model(f"model: there is no model {shown!r}{hint}")
        return found

    async def _renew_if_due(self) -> None:
        ready = [one for one in self._tritons if one.health.read().is_ready]
        if not ready and not self._models:
            raise of_refusal(unavailable(self._tritons[0].health.read().reason))
        known = [(id(one), one.health.read().models, one.health.read().versions) for one in ready]
        if ready and known != self._known:
            if self._renewing is None:
                self._renewing = asyncio.create_task(self._renew(ready, known))
            await asyncio.shield(self._renewing)
        elif ready and self._renewing is None and time.monotonic() - self._renewed_at > TTL_S:
            self._renewing = asyncio.create_task(self._renew(ready, known))

    async def _renew(self, ready: Sequence[Triton], known: object) -> None:
        try:
            groups = [(triton, *one) for triton in ready for one in _groups(triton)]
            descriptions = await asyncio.gather(
                *(self._describe(triton, group, names) for triton, group, names in groups)
            )
            found: dict[tuple[str, str], ServedModel] = {}
            for (triton, group, names), description in zip(groups, descriptions, strict=True):
                key = group, description.model
                others = found[key].tritons if key in found else ()
                created = self._created.setdefault(f"{group}/{description.model}", _now())
                found[key] = ServedModel(
                    description.model, group, names, description, (*others, triton), created
                )
            self._set(list(found.values()))
            self._known, self._renewed_at = known, time.monotonic()
        finally:
            self._renewing = None

    def _set(self, models: list[ServedModel]) -> None:
        served = [one.id for one in models]
        self._models = {
            one.id: one
            for one in (_qualified(one) if served.count(one.id) > 1 else one for one in models)
        }
        self._aliases = {}
        for model in self._models.values():
            for name in (model.group, *model.names.values()):
                self._aliases.setdefault(name, model)

    async def _describe(self, triton: Triton, group: str, names: dict[str, str]) -> Description:
        """Of a group; the former one if the server does not answer now."""
        key = id(triton), group
        tokenizer = names.get("tokenizer")
        found = self._descriptions.get(key, Description(group))
        if tokenizer is None:
            return found
        try:
            async with asyncio.timeout(DESCRIBE_TIMEOUT_S):
                values = await triton.infer(tokenizer, [flag("describe", True)], _OUTPUTS, {})
            found = msgspec.json.decode(values["description"][0], type=Description)
        except (Problem, InflightError, TimeoutError, LookupError, msgspec.DecodeError):
            return found
        self._descriptions[key] = found
        return found


_OUTPUTS = ["description"]


def unknown_model(message: str) -> Problem:
    return Problem(message, 404, param="model", code=MODEL_NOT_FOUND)


def _groups(triton: Triton) -> list[tuple[str, dict[str, str]]]:
    """The groups of a server: the name of each, and its models by their roles."""
    found: dict[str, dict[str, str]] = {}
    for name in triton.health.read().models:
        match = _MEMBER.fullmatch(name)
        if match is not None:
            prefix, role = match.groups()
            found.setdefault(prefix or _ENGINE, {})[role] = name
    return [(group, names) for group, names in found.items() if {"generate", "chat"} & {*names}]


def _qualified(model: ServedModel) -> ServedModel:
    """Of several models with the same name."""
    return ServedModel(
        f"{model.group}/{model.id}",
        model.group,
        model.names,
        model.description,
        model.tritons,
        model.created,
    )


def _now() -> int:
    return int(time.time())
