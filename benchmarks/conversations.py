"""Conversations that come back, with the prefix cache, with a tier below it, and without.

    python benchmarks/conversations.py [--case chats,agents,unrelated]
        [--variants off,host,recompute] [--variant NAME SETTING=VALUE ...] [--pool-share 0.25]
        [--concurrency 4] [--model MODEL] [--device cuda] [--result FILE] [--set NAME=VALUE ...]

`chats`: --chats conversations of --turns turns. All begin with the same --system tokens; a turn
appends --first tokens (a document, say), later ones --user tokens, and generates --output. Each
prompt is the whole conversation so far. Turn k of all chats precedes turn k + 1 of any.
`agents`: --trees agents, each of which answers once, after --first tokens, and then forks into
--branches, which make --rounds tool calls: a call appends --user tokens and generates --output.
Half-way, each branch forks a sub-agent, which makes the other calls too. Call k of all precedes
call k + 1 of any.
`unrelated`: the lengths of `chats`, but no two prompts begin alike, so that a cache can only cost
time.

The KV pool has --pool-share of the blocks that all sequences of the case take together, in
`unrelated` those of `chats`. So the blocks of a conversation have been evicted when it comes back,
unless something keeps them. Variants are settings; the others are compared with the first one:

    off         the prefix cache alone
    recompute   no prefix cache
    host        `kv_host_memory_bytes` for all sequences of the case, and a quarter more

--variant adds one of any settings. Each case and variant has a process of its own, since the memory
of tiers is allocated at the start.

TTFT is from the submission to the first token. Up to --concurrency requests are in flight, and a
request is submitted once those before it have their first tokens: others decode meanwhile, but no
prompt waits for another one. `first` are first turns, `later` all others; `reusable` is the share
of later prompts that earlier requests have computed, thus the highest hit rate. `same_outputs`: the
share of requests with the same output tokens as in the first variant; where sums depend on the
batch, some differ. `tiers`: what the engine's statistics count of a tier; `from_host`: the share of
hits whose blocks it held. Random weights if the model has none, random tokens, greedy sampling, as
in `inflight bench engine`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

import in_process
from inflight import config as settings
from inflight.checkpoint.locate import locate
from inflight.cli.bench import engine as bench
from inflight.cli.bench import start
from inflight.config import EngineConfig
from inflight.core.request import Request
from inflight.engine.engine import Engine
from inflight.errors import ConfigError, InflightError
from inflight.models.registry import read_spec
from inflight.sampling.params import SamplingParams

HOST_MARGIN = 1.25
WARM_UP_OUTPUT = 4


@dataclass(frozen=True, slots=True)
class Lengths:
    """Numbers of sequences and tokens; see the module's docstring."""

    system: int
    first: int
    user: int
    output: int
    chats: int
    turns: int
    trees: int
    branches: int
    rounds: int


@dataclass(slots=True)
class Conversation:
    """The token ids so far, of prompts and outputs."""

    ids: list[int]

    def fork(self) -> Conversation:
        return Conversation(list(self.ids))


@dataclass(frozen=True, slots=True)
class Turn:
    """What is appended to a conversation before the model answers.

    Attributes:
        number: of the turn in its conversation, from 0.
    """

    conversation: Conversation
    added: list[int]
    number: int


Rounds = Iterator[list[Turn]]
"""A round is requested once all outputs of the one before have been appended."""
Draw = Callable[[int], list[int]]
"""Random token ids, so many."""


def chats(draw: Draw, lengths: Lengths) -> Rounds:
    system = draw(lengths.system)
    members = [Conversation(list(system)) for _ in range(lengths.chats)]
    for number in range(lengths.turns):
        size = lengths.user if number else lengths.first
        yield [Turn(one, draw(size), number) for one in members]


def agents(draw: Draw, lengths: Lengths) -> Rounds:
    system = draw(lengths.system)
    roots = [Conversation(list(system)) for _ in range(lengths.trees)]
    yield [Turn(one, draw(lengths.first), 0) for one in roots]
    members = [root.fork() for root in roots for _ in range(lengths.branches)]
    for number in range(1, lengths.rounds + 1):
        if number == lengths.rounds // 2 + 1:
            members += [one.fork() for one in members]
        yield [Turn(one, draw(lengths.user), number) for one in members]


def unrelated(draw: Draw, lengths: Lengths) -> Rounds:
    size = lengths.system + lengths.first
    for number in range(lengths.turns):
        yield [Turn(Conversation([]), draw(size), number) for _ in range(lengths.chats)]
        size += lengths.output + lengths.user


CASES = {"chats": chats, "agents": agents, "unrelated": unrelated}


@dataclass(frozen=True, slots=True)
class Size:
    """Tokens of a case: those of all sequences together, common ones once; and of the longest."""

    total: int
    longest: int

    @classmethod
    def of(cls, case: str, lengths: Lengths) -> Size:
        total, longest = lengths.system, 0
        kept = chats if case == "unrelated" else CASES[case]
        for turns in kept(lambda count: [0] * count, lengths):
            for turn in turns:
                turn.conversation.ids += turn.added + [0] * lengths.output
                total += len(turn.added) + lengths.output
                longest = max(longest, len(turn.conversation.ids))
        return cls(total, longest)


@dataclass(slots=True)
class Served:
    """A turn that was served.

    Attributes:
        number: of the turn.
        num_prompt, num_reusable, num_cached: prompt tokens: all, those that earlier requests have
            computed, and those found in the cache.
    """

    number: int
    num_prompt: int
    num_reusable: int
    submitted: float
    num_cached: int = 0
    ttft_s: float | None = None
    output: list[int] = field(default_factory=list)


class Server:
    """Serves turns on an engine.

    Args:
        concurrency: requests in flight.
    """

    def __init__(self, engine: Engine, concurrency: int) -> None:
        self._engine = engine
        self._concurrency = concurrency
        self._next_id = 1

    def serve(self, turns: Iterable[Turn], num_output: int) -> list[Served]:
        """Returns in order of the turns; appends prompts and outputs to the conversations."""
        params = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)
        waiting = deque(turns)
        flying: dict[int, tuple[Turn, Served]] = {}
        found: list[Served] = []
        while waiting or flying:
            has_prompt = any(one.ttft_s is None for _, one in flying.values())
            if waiting and len(flying) < self._concurrency and not has_prompt:
                turn = waiting.popleft()
                found.append(self._submit(turn, params))
                flying[self._next_id - 1] = turn, found[-1]
            for event in self._engine.sweep() + self._engine.step():
                if event.error is not None:
                    raise InflightError(event.error)
                turn, served = flying[event.request_id]
                if event.token_ids and served.ttft_s is None:
                    served.ttft_s = time.perf_counter() - served.submitted
                    served.num_cached = event.num_cached_tokens
                served.output += event.token_ids
                if event.is_last:
                    turn.conversation.ids += served.output
                    del flying[event.request_id]
        return found

    def _submit(self, turn: Turn, params: SamplingParams) -> Served:
        num_reusable = len(turn.conversation.ids)
        turn.conversation.ids += turn.added
        prompt = list(turn.conversation.ids)
        served = Served(turn.number, len(prompt), num_reusable, time.perf_counter())
        self._engine.submit(Request(self._next_id, prompt, params))
        self._next_id += 1
        return served


def measure(
    raw: dict[str, Any], case: str, lengths: Lengths, concurrency: int
) -> tuple[dict[str, Any], list[list[int]]]:
    """Run a case on a new engine; returns the figures and the outputs of all requests."""
    engine = start.build(settings.parse(raw, "settings")).engine
    draw = in_process.RandomTokens(engine.runner.vocab_size).draw
    server = Server(engine, concurrency)
    longest = Size.of(case, lengths).longest - lengths.output
    warm_up = [Turn(Conversation([]), draw(longest), 0) for _ in range(concurrency)]
    server.serve(warm_up, WARM_UP_OUTPUT)
    before = engine.stats()
    started = time.perf_counter()
    served: list[Served] = []
    for turns in CASES[case](draw, lengths):
        served += server.serve(turns, lengths.output)
    seconds = time.perf_counter() - started
    after = engine.stats()
    loaded = after.num_host_blocks_loaded - before.num_host_blocks_loaded
    num_cached = sum(one.num_cached for one in served)
    found = {
        "num_blocks": engine.runner.num_blocks,
        **figures(served),
        "from_host": round(loaded * engine.runner.block_size / max(1, num_cached), 4),
        "out_tok_s": round(sum(len(one.output) for one in served) / seconds, 1),
        "seconds": round(seconds, 2),
        "preemptions": after.num_preemptions - before.num_preemptions,
        "tiers": _tier_counters(msgspec.structs.asdict(before), msgspec.structs.asdict(after)),
    }
    return found, [one.output for one in served]


def figures(served: Sequence[Served]) -> dict[str, Any]:
    """Hit rates and TTFT of first and of later turns."""
    found: dict[str, Any] = {"requests": len(served)}
    numbers = sorted({one.number for one in served})
    by_turn = [[one for one in served if one.number == number] for number in numbers]
    later = [one for one in served if one.number > 0]
    for name, members in (("first", by_turn[0]), ("later", later)):
        if not members:  # with --turns 1
            continue
        num_prompt = sum(one.num_prompt for one in members)
        if name == "later":
            reusable = sum(one.num_reusable for one in members) / num_prompt
            found["reusable"] = round(reusable, 4)
        hits = sum(one.num_cached for one in members) / num_prompt
        found[f"hit_rate_{name}"] = round(hits, 4)
        for percent in (50, 99):
            found[f"ttft_{name}_p{percent}_ms"] = _ttft_ms(members, percent)
    found["ttft_p50_ms_by_turn"] = [_ttft_ms(members, 50) for members in by_turn]
    return found


def _ttft_ms(served: Sequence[Served], percent: int) -> float:
    times = [one.ttft_s for one in served if one.ttft_s is not None]
    return round(float(np.percentile(times, percent)) * 1e3, 3)


def _tier_counters(before: dict[str, Any], after: dict[str, Any]) -> dict[str, int]:
    """By how much the statistics of tiers have risen."""
    return {
        name: value - before[name]
        for name, value in after.items()
        if isinstance(value, int) and ("host" in name or "disk" in name) and value > before[name]
    }


def compare(base: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """TTFT of later turns as a share of that in the first variant's row."""
    column = "ttft_later_p50_ms"
    if column not in found:
        return {}
    return {f"ttft_later_of_{base['variant']}": round(found[column] / base[column], 3)}


def same_outputs(base: list[list[int]], outputs: list[list[int]]) -> float:
    """The share of requests with the same tokens."""
    same = [one == other for one, other in zip(base, outputs, strict=True)]
    return round(sum(same) / len(same), 4)


class Case:
    """A case with the settings of its variants.

    Raises:
        ConfigError: the pool does not hold the requests in flight, or a setting is not allowed.
    """

    def __init__(self, name: str, lengths: Lengths, args: argparse.Namespace) -> None:
        self.name = name
        self._lengths = lengths
        self._args = args
        size = Size.of(name, lengths)
        self.raw = bench.engine_settings(args.model, args.device, [], {})
        self.raw |= {"enable_prefix_caching": True, **in_process.changes(args.set)}
        config = settings.parse(self.raw, "settings")
        self._num_blocks = -(-size.total // config.block_size)
        if "num_blocks" not in self.raw:
            self.raw["num_blocks"] = int(self._num_blocks * args.pool_share)
        num_tokens = self.raw["num_blocks"] * config.block_size
        if num_tokens < args.concurrency * size.longest:
            raise ConfigError(
                f"{name}: a pool of {num_tokens:,} tokens does not hold {args.concurrency} "
                f"sequences of {size.longest:,}; raise --pool-share, or lower --concurrency"
            )
        self.variants = {one: self.raw | changes for one, changes in self._variants(config).items()}
        for one, raw in self.variants.items():
            settings.parse(raw, f"variant {one}")

    def _variants(self, config: EngineConfig) -> dict[str, dict[str, Any]]:
        """What each variant changes, in order."""
        layout = read_spec(locate(config.model)).kv_layout(config.kv_dtype)
        all_bytes = self._num_blocks * layout.block_bytes(config.block_size)
        known: dict[str, dict[str, Any]] = {
            "off": {},
            "recompute": {"enable_prefix_caching": False},
            "host": {"kv_host_memory_bytes": int(all_bytes * HOST_MARGIN)},
        }
        found = {}
        for name in filter(None, self._args.variants.split(",")):
            if name not in known:
                raise ConfigError(f"--variants: {name!r} is unknown; allowed: {', '.join(known)}")
            found[name] = known[name]
        for name, *pairs in self._args.variant:
            found[name] = in_process.changes(pairs)
        return found

    def rows(self) -> Iterator[dict[str, Any]]:
        """A row for each variant, each measured in a process of its own."""
        base: tuple[dict[str, Any], list[list[int]]] | None = None
        spawn = multiprocessing.get_context("spawn")
        for variant, raw in self.variants.items():
            with concurrent.futures.ProcessPoolExecutor(1, spawn) as pool:
                work = pool.submit(measure, raw, self.name, self._lengths, self._args.concurrency)
                found, outputs = work.result()
            row = {"case": self.name, "variant": variant, **found}
            base = base or (row, outputs)
            yield row | compare(base[0], row) | {"same_outputs": same_outputs(base[1], outputs)}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    in_process.add_options(parser)
    parser.add_argument("--case", default=",".join(CASES), help="by ','")
    parser.add_argument("--variants", default="off,host,recompute", help="by ','")
    parser.add_argument("--variant", nargs="+", action="append", default=[], metavar="NAME")
    parser.add_argument("--pool-share", type=float, default=0.25)
    parser.add_argument("--concurrency", type=int, default=4)
    defaults = Lengths(1024, 2048, 512, 64, chats=24, turns=4, trees=6, branches=4, rounds=4)
    for name, value in dataclasses.asdict(defaults).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    lengths = Lengths(**{one.name: getattr(args, one.name) for one in dataclasses.fields(Lengths)})
    try:
        cases = [Case(name, lengths, args) for name in args.case.split(",")]
    except ConfigError as error:
        raise SystemExit(str(error)) from None
    facts = {
        "pool_share": args.pool_share,
        "concurrency": args.concurrency,
        **dataclasses.asdict(lengths),
        "settings": {one.name: one.variants for one in cases},
    }
    found = []
    for case in cases:
        for row in case.rows():
            print(row, flush=True)
            found.append(row)
            # Each time, so that an interrupted run keeps its rows.
            in_process.write(args, "conversations", found, **facts)


if __name__ == "__main__":
    main()
