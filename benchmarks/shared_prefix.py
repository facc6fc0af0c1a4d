"""Requests whose prompts begin alike, with the prefix cache and without.

    python benchmarks/shared_prefix.py [--model MODEL] [--device cuda] [--requests 256]
        [--shared 2048] [--own 128] [--output 128] [--runs 2] [--result FILE]
        [--set NAME=VALUE ...]

All requests are submitted at once. `cold`: no block of the prefix is cached before; `warm`: all of
them are, from the run before, whose other tokens differ. `apart`: no prompts begin alike, so that
the cache can only cost time. Random weights and greedy sampling, as in `inflight bench engine`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import msgspec

import in_process
import result
from inflight import config as settings
from inflight.cli.bench import engine as bench
from inflight.cli.bench import start
from inflight.cli.bench.rows import Row
from inflight.core.request import Request
from inflight.engine.engine import Engine, generate
from inflight.sampling.params import SamplingParams


class Prompts:
    """Requests with random prompts.

    Args:
        vocab_size: token ids are below it.
        args: numbers of requests and tokens.
    """

    def __init__(self, vocab_size: int, args: argparse.Namespace) -> None:
        self._tokens = in_process.RandomTokens(vocab_size)
        self._args = args
        self._next_id = 1
        self._params = SamplingParams(max_tokens=args.output, temperature=0.0, ignore_eos=True)

    def prefix(self) -> list[int]:
        return self._tokens.draw(self._args.shared)

    def requests(self, prefix: list[int] | None) -> list[Request]:
        """With a common prefix; None for one of each request's own."""
        found = []
        for _ in range(self._args.requests):
            own = self._tokens.draw(self._args.own)
            prompt = (self.prefix() if prefix is None else prefix) + own
            found.append(Request(self._next_id, prompt, self._params))
            self._next_id += 1
        return found


def measure(engine: Engine, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each kind of prompts with the cache on, then off."""
    for caches in (True, False):
        config = msgspec.structs.replace(engine.config, enable_prefix_caching=caches)
        runner = engine.runner
        one = Engine(config, runner, engine.max_model_len, [])
        prompts = Prompts(runner.vocab_size, args)
        seconds: dict[str, list[float]] = {}
        hits: dict[str, float] = {}

        def timed(
            kind: str,
            requests: list[Request],
            one: Engine = one,
            seconds: dict[str, list[float]] = seconds,
            hits: dict[str, float] = hits,
        ) -> None:
            before = one.scheduler.num_cached_tokens, one.scheduler.num_prompt_tokens
            started = time.perf_counter()
            generate(one, requests)
            seconds.setdefault(kind, []).append(time.perf_counter() - started)
            cached = one.scheduler.num_cached_tokens - before[0]
            hits[kind] = cached / (one.scheduler.num_prompt_tokens - before[1])

        timed("warm-up", prompts.requests(prompts.prefix()))
        for _ in range(args.runs):
            prefix = prompts.prefix()
            timed("cold", prompts.requests(prefix))
            timed("warm", prompts.requests(prefix))
        for _ in range(args.runs):
            timed("apart", prompts.requests(None))
        for kind in ("cold", "warm", "apart"):
            rates = [args.requests * args.output / one for one in seconds[kind]]
            yield {
                "prompts": kind,
                "prefix_caching": caches,
                "hit_rate": round(hits[kind], 4),
                "out_tok_s": result.spread(rates, 1),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    in_process.add_options(parser)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--shared", type=int, default=2048)
    parser.add_argument("--own", type=int, default=128)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--runs", type=int, default=2)
    args = parser.parse_args()
    rows = [Row("shared", args.requests, args.shared + args.own, args.output)]
    raw = bench.engine_settings(args.model, args.device, rows, in_process.changes(args.set))
    engine = start.build(settings.parse(raw, "settings")).engine
    found = []
    for row in measure(engine, args):
        print(row, flush=True)
        found.append(row)
    facts = {name: getattr(args, name) for name in ("requests", "shared", "own", "output")}
    in_process.write(args, "shared prefix", found, settings=raw, **facts)


if __name__ == "__main__":
    main()
