"""What a run will do, from the options of the command."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from inflight.cli.bench.serving.load import Limit
from inflight.cli.bench.serving.results import slo as slo_
from inflight.cli.bench.serving.results.slo import Slo
from inflight.cli.bench.serving.results.window import Window, window
from inflight.cli.bench.serving.targets.grpc import CHAT, GENERATE, GrpcTarget
from inflight.cli.bench.serving.targets.openai import OpenAITarget
from inflight.cli.bench.serving.targets.target import Target
from inflight.cli.bench.serving.workload import lengths as lengths_
from inflight.cli.bench.serving.workload.arrivals import poisson
from inflight.cli.bench.serving.workload.lengths import Lengths, Shape
from inflight.cli.options import LoadOptions, TargetOptions
from inflight.errors import ConfigError
from inflight_client import AsyncClient

CONCURRENCY, RATE = "concurrency", "rate"
ENDPOINTS = {"grpc": "127.0.0.1:8001", "openai": "http://127.0.0.1:9000"}
AUTO = "auto"
DEFAULT_LEVELS = "1,4,16,64"
DEFAULT_DURATION_S = 30.0
DEFAULT_INPUT, DEFAULT_OUTPUT = "128", "64"


@dataclass(frozen=True, slots=True)
class Plan:
    """
    Attributes:
        kind: CONCURRENCY or RATE, of all levels.
        levels: values, in the order of the run; of a search, the first rate, if it is given.
        limit: of each level.
        lengths: of prompts and outputs, `lengths_name` in words.
        slo: None for none.
        cost_per_hour: None for none.
        num_warmup: requests before the first level, which are not measured.
        shared_prefix: tokens that all prompts have in common.
        max_model_len: lengths are drawn until they fit; None for no limit.
    """

    kind: str
    levels: tuple[float, ...]
    limit: Limit
    lengths: Lengths
    lengths_name: str
    slo: Slo | None
    cost_per_hour: float | None
    num_warmup: int
    shared_prefix: int
    max_model_len: int | None
    seed: int
    is_search: bool = False
    """The levels are rates that a search for the highest one within the SLO chooses."""

    def arrivals(self, rate: float) -> Iterator[float]:
        """Times of an open loop, in seconds from its start: the same ones for each target."""
        return poisson(rate, f"{self.seed} {RATE} {rate:g} arrivals")

    def shapes(self, name: str) -> Iterator[Shape]:
        """Lengths of the requests of a level, such as `rate 4`: the same ones for each target."""
        source = random.Random(f"{self.seed} {name} lengths")
        for index in itertools.count():
            yield lengths_.draw_fitting(self.lengths, source, index, self.max_model_len)

    def window(self, rate: float) -> Window:
        """Of an open loop with a ramp."""
        limit = self.limit
        return window(self.arrivals(rate), limit.ramp_s, limit.num_requests, limit.duration_s)

    def patience_s(self, num_tokens: int) -> float:
        """See `Slo.patience_s`; infinite without an SLO."""
        return self.slo.patience_s(num_tokens) if self.slo else math.inf

    def workload(self) -> dict[str, str]:
        """In words, for the report."""
        found = {"lengths": self.lengths_name}
        if self.shared_prefix:
            found["shared prefix"] = f"{self.shared_prefix} tokens"
        if self.limit.ramp_s:
            found["not measured"] = (
                f"requests due in the first {self.limit.ramp_s:g} s, and those sent until the "
                "measured ones had ended"
            )
        return {**found, "warm-up": f"{self.num_warmup} requests", "seed": str(self.seed)}


def plan(options: LoadOptions) -> Plan:
    """
    Raises:
        ConfigError: an option is not valid, or two exclude each other.
    """
    if options.concurrency and options.rate:
        raise ConfigError("--concurrency and --rate are mutually exclusive; give one of them")
    kind = RATE if options.rate else CONCURRENCY
    duration_s = options.duration
    if duration_s is None and options.requests is None:
        duration_s = DEFAULT_DURATION_S
    if options.ramp and kind != RATE:
        raise ConfigError("--ramp: a closed loop has no arrivals to go on with; give --rate")
    found, name = _lengths(options)
    is_search = (options.rate or "").partition(":")[0] == AUTO
    return Plan(
        kind=kind,
        levels=(
            _first_rate(options)
            if is_search
            else _levels(kind, options.rate or options.concurrency or DEFAULT_LEVELS)
        ),
        is_search=is_search,
        limit=Limit(options.requests, duration_s, options.ramp),
        lengths=found,
        lengths_name=name,
        slo=slo_.parse(options.slo) if options.slo else None,
        cost_per_hour=options.cost,
        num_warmup=options.warmup,
        shared_prefix=options.shared_prefix,
        max_model_len=options.max_model_len,
        seed=options.seed,
    )


def target(options: TargetOptions) -> Target:
    """
    Raises:
        ConfigError: the endpoint is unknown.
        InvalidRequest: another option is not valid.
    """
    if options.endpoint not in ENDPOINTS:
        raise ConfigError(
            f"--endpoint: {options.endpoint!r} is unknown; allowed: {', '.join(ENDPOINTS)}"
        )
    url = options.url or ENDPOINTS[options.endpoint]
    if options.endpoint == "openai":
        return OpenAITarget(
            url,
            options.model,
            is_chat=options.chat,
            api_key=options.api_key,
            ca_file=options.ca_file,
            timeout_s=options.timeout,
        )
    model = options.model or (CHAT if options.chat else GENERATE)
    client = AsyncClient(
        url,
        generate_model=model,
        chat_model=model,
        timeout=options.timeout,
        max_retries=0,  # a failed request is a result
        api_key=options.api_key,
        ca_file=options.ca_file,
    )
    return GrpcTarget(client, model, is_chat=options.chat)


def _first_rate(options: LoadOptions) -> tuple[float, ...]:
    """Of `auto` or `auto:RATE`; () if it is not given."""
    if not options.slo:
        raise ConfigError("--rate auto: the highest rate is that within an SLO; give --slo")
    _, colon, text = (options.rate or "").partition(":")
    return _levels(RATE, text) if colon else ()


def _levels(kind: str, text: str) -> tuple[float, ...]:
    found = []
    for part in text.split(","):
        try:
            value = float(part)
        except ValueError:
            value = math.nan
        is_whole = value.is_integer() or kind == RATE
        if not (0 < value < math.inf and is_whole):
            what = "requests per second" if kind == RATE else "whole numbers"
            auto = f", or {AUTO} or {AUTO}:FIRST" if kind == RATE else ""
            raise ConfigError(
                f"--{kind}: {part!r} is not valid; allowed: {what} above 0, by ','{auto}"
            )
        found.append(value)
    if len(set(found)) < len(found):
        raise ConfigError(f"--{kind}: {text!r} has a value twice")
    return tuple(found)


def _lengths(options: LoadOptions) -> tuple[Lengths, str]:
    if options.scale <= 0:
        raise ConfigError(f"--scale: {options.scale:g} is not valid; allowed: a number above 0")
    scaled = "" if options.scale == 1 else f" x {options.scale:g}"
    if options.lengths:
        if options.input_tokens or options.output_tokens:
            raise ConfigError(
                "--lengths and --input-tokens or --output-tokens are mutually exclusive"
            )
        return lengths_.named(options.lengths).scaled(options.scale), options.lengths + scaled
    inputs = options.input_tokens or DEFAULT_INPUT
    outputs = options.output_tokens or DEFAULT_OUTPUT
    return (
        lengths_.Drawn(
            lengths_.spread(inputs, "--input-tokens"), lengths_.spread(outputs, "--output-tokens")
        ).scaled(options.scale),
        f"{inputs} input tokens, {outputs} output tokens{scaled}",
    )
