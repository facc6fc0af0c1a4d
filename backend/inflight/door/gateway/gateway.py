"""What all routes of the gateway share: models, access and generations."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request

from inflight.door.gateway.directory import Directory, ServedModel
from inflight.door.gateway.generation import Call, Generation, MergedGenerations, Stream
from inflight.door.gateway.parsers import unread_variables
from inflight.door.gateway.problem import TOO_DEEP, Problem
from inflight.door.gateway.triton import Triton
from inflight.door.http.body import BodyReader, checked
from inflight.door.http.busy_poll import BusyPoll
from inflight.door.http.gate import visit_of
from inflight.door.http.middleware import REQUEST_ID
from inflight.door.limits import Limits
from inflight.door.tracing import Tracing
from inflight.ipc.metrics.mapped_counter import MappedCounter
from inflight.ipc.metrics.usage import ACCOUNT

T = TypeVar("T")
F = TypeVar("F")
Parse = Callable[[bytes, type[F], bool], tuple[F, list[str]]]
"""A parser of a body: fields of a kind, and the names of unknown ones, which may be refused."""

logger = logging.getLogger(__name__)

_TYPES = ("", "application/json", "application/x-www-form-urlencoded")


@dataclass(frozen=True, slots=True)
class Policy:
    """How the gateway treats requests.

    Attributes:
        is_strict: a field that is not known is refused, not ignored.
        default_completion_tokens: of /v1/completions without max_tokens.
    """

    limits: Limits = field(default_factory=Limits)
    is_strict: bool = False
    default_completion_tokens: int = 16


class Gateway:
    """The state that the routes share.

    Args:
        tritons: at least one.
        busy_poll: see `BusyPoll`.
        ignored: counts fields of requests that are not known, and variables that no template reads.
        tracing: of inference requests; None for no spans.

    Attributes:
        directory: of the models.
    """

    def __init__(
        self,
        tritons: Sequence[Triton],
        policy: Policy,
        busy_poll: BusyPoll | None = None,
        ignored: MappedCounter | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._tracing = tracing
        self._ignored = ignored
        self.tritons = tritons
        self.policy = policy
        self.directory = Directory(tritons)
        self.busy_poll = busy_poll or BusyPoll(0.0)
        self._bodies = BodyReader(policy.limits, _TYPES)

    async def read(self, request: Request, parse: Callable[[bytes], T]) -> T:
        """The parsed body of a request. Raises Problem, Refusal."""
        body = await self._bodies.read(request)
        try:
            return await checked(body, lambda: parse(body))
        except RecursionError:
            raise Problem(TOO_DEEP) from None

    async def read_fields(self, request: Request, kind: type[F], parse: Parse[F]) -> F:
        """The fields of a request; those that are not known are counted. Raises Problem, Refusal.

        Args:
            parse: of a wire format.
        """
        is_strict = self.policy.is_strict
        fields, unknown = await self.read(request, lambda body: parse(body, kind, is_strict))
        self._ignore(len(unknown))
        return fields

    def check_variables(self, served: ServedModel, variables: Mapping[str, Any] | None) -> None:
        """Treat variables that a model's chat templates do not read as unknown fields.

        Args:
            variables: chat_template_kwargs of the request.

        Raises:
            Problem: there is one, and such fields are refused.
        """
        found = served.description
        templates = (found.chat_template or "") + (found.tool_chat_template or "")
        unread = unread_variables(templates, variables or {})
        if unread and self.policy.is_strict:
            name = unread[0][:64] if unread[0].isprintable() else "..."
            raise Problem(
                f"chat_template_kwargs: the chat template of {served.id} does not read {name!r}; "
                "omit it",
                param="chat_template_kwargs",
            )
        self._ignore(len(unread))

    def _ignore(self, count: int) -> None:
        if count:
            logger.debug("ignored %d unknown fields", count)
            if self._ignored is not None:
                self._ignored.add(count)

    async def find(self, request: Request, name: str) -> ServedModel:
        """A model that the key of a request allows. Raises Problem."""
        return await self.directory.find(name, lambda model: self.can_use(request, model))

    async def models(self, request: Request) -> list[ServedModel]:
        """Those that the key of a request allows. Raises Problem."""
        return [one for one in await self.directory.models() if self.can_use(request, one)]

    async def admit(self, request: Request, model: str) -> None:
        """Admit an inference request of a key, until the response is complete.

        Args:
            model: Triton's name.

        Raises:
            InflightError: the key does not allow it.
        """
        visit = visit_of(request)
        if visit is not None:
            await visit.begin(model)

    def can_use(self, request: Request, model: ServedModel) -> bool:
        """Whether the key of a request allows one of the model's ensembles."""
        return bool(self.usable(request, model))

    def usable(self, request: Request, model: ServedModel) -> str:
        """Triton's name of an ensemble of the model that the key allows; empty for none."""
        visit = visit_of(request)
        names = (name for role in ("generate", "chat") if (name := model.member(role)))
        return next((one for one in names if visit is None or visit.key.allows(one)), "")

    async def generate(
        self, request: Request, served: ServedModel, calls: Sequence[Call]
    ) -> Stream:
        """Calls of one model as one stream, to be started and closed by its user.

        Raises:
            Problem: no server is ready.
            InflightError: the key does not allow it.
        """
        await self.admit(request, calls[0].model)
        visit = visit_of(request)
        parameters = {} if visit is None else {ACCOUNT: visit.key.account}
        client, timeout_s = request.headers, self.policy.limits.first_byte_timeout_s
        made: list[Generation] = []
        try:
            for call in calls:
                made.append(Generation(served.choose(), call, parameters, client, timeout_s))
        except Problem:
            for one in made:
                one.close()
            raise
        stream = made[0] if len(made) == 1 else MergedGenerations(made, calls[0].num_outputs)
        if self._tracing is None:
            return stream
        from inflight.door.gateway.traced import TracedStream

        headers = ((name, value) for name, value in request.headers.items())
        span = self._tracing.begin(headers, request.scope[REQUEST_ID])
        span.requested(calls[0].model)
        return TracedStream(stream, span)
