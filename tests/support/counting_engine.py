"""An engine over a runner that only counts."""

from __future__ import annotations

from fake_runner import CountingRunner, PagedRunner
from inflight.config import EngineConfig
from inflight.core.request import Request, TokenEvent
from inflight.engine.engine import Engine
from inflight.sampling.params import SamplingParams

EOS = 99


class Clock:
    """Seconds, as the test sets them."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_engine(
    runner: CountingRunner | PagedRunner | None = None,
    clock: Clock | None = None,
    **settings: object,
) -> Engine:
    config = EngineConfig(model="none", **settings)  # type: ignore[arg-type]
    runner = runner or CountingRunner()
    if clock is None:
        return Engine(config, runner, max_model_len=64, eos_token_ids=[EOS])
    return Engine(config, runner, max_model_len=64, eos_token_ids=[EOS], clock=clock)


def request(
    request_id: int, prompt: list[int], acknowledged: bool = False, **params: object
) -> Request:
    return Request(request_id, prompt, SamplingParams(**params), acknowledged=acknowledged)  # type: ignore[arg-type]


def run(engine: Engine) -> dict[int, list[TokenEvent]]:
    events: dict[int, list[TokenEvent]] = {}
    while engine.has_work:
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
    return events
