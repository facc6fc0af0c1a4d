"""Serving overhead of Triton: engine alone, through `llm`, through the ensemble `generate`.

    python benchmarks/serving.py [--grpc-door] [--set KEY=VALUE ...] [--result FILE]

Requires a perf_analyzer with --request-count (such as 2.60). The packages need not be installed;
PYTHONPATH suffices. All measurements are on one machine in one run: first the engine alone, in a
process that exits before the next one starts; then one tritonserver under Triton's perf_analyzer,
with a gRPC stream per request. The load is the same throughout: one request per stream, all sent at
once, timed until the last token; the best of several runs counts. Random weights, greedy, EOS
ignored, no prefix cache. The tokenizer is synthetic: each of its words is one token, so text
prompts have an exact length. Each run is checked to have produced the requested number of tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engine as alone
import result
import servers
from inflight.deploy import repository
from inflight.deploy.tritonserver.server import Server
from inflight.errors import InflightError
from inflight.ipc import engine_client

STREAMS, INPUT_LEN, OUTPUT_LEN = 256, 512, 256
MUST = {"llm": 0.95, "generate": 0.90}
GOAL = {"generate": 0.97}
GUARDED = "generate through the gRPC door"
MAX_EXTRA_US = 300.0
# tritonserver 2.51 with vllm_backend and vLLM 0.22.1, measured earlier on the same kind of machine
# with this load and the default model, one run: tokens/s at 256 streams, ms per token at one.
PEER = {256: 5041.0, 1: 4.92}
START_TIMEOUT_S = 600.0
RUN_TIMEOUT_S = 300.0


# ---------------------------------------------------------------- model


def make_model(source: Path, target: Path) -> list[str]:
    """Create a model folder: the files of `source`, with a tokenizer made for its vocabulary.

    Returns:
        Words of one token each, leading space included.
    """
    target.mkdir()
    for file in source.iterdir():
        if file.name != "tokenizer.json":
            (target / file.name).symlink_to(file.resolve())
    vocab_size = json.loads((source / "config.json").read_text())["vocab_size"]
    tokenizer, words = make_tokenizer(vocab_size)
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    return words


def _syllables() -> list[str]:
    return ["".join(pair) for pair in itertools.product("bcdfghjklmnpqrstvwxyz", "aeiou")]


@functools.cache
def _merges() -> list[tuple[str, str]]:
    """A million of them, of syllables and of words of one to three syllables."""
    syllables = _syllables()
    merges = [(syllable[0], syllable[1]) for syllable in syllables]
    merges += [("Ġ", syllable) for syllable in syllables]
    merges += [(f"Ġ{a}", b) for a, b in itertools.product(syllables, syllables)]
    triples = [(f"Ġ{a}{b}", c) for a, b, c in itertools.product(syllables, repeat=3)]
    random.Random(0).shuffle(triples)
    return merges + triples


def make_tokenizer(vocab_size: int) -> tuple[dict[str, Any], list[str]]:
    """A byte-level BPE whose tokens are the bytes, syllables, and words of up to three syllables.

    A syllable is a consonant and a vowel, and nothing else merges, so a word has exactly one
    segmentation. `Ġ` is the byte-level alphabet's space.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    vocabulary = sorted(ByteLevel.alphabet())
    merges = _merges()[: vocab_size - len(vocabulary)]
    vocabulary += [a + b for a, b in merges]
    if len(vocabulary) != vocab_size or len(merges) <= 2 * len(_syllables()):
        sys.exit(f"no tokenizer can be made up for a vocabulary of {vocab_size} tokens")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "trim_offsets": True},
        "post_processor": None,
        "decoder": {**byte_level, "trim_offsets": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(vocabulary)},
            "merges": [f"{a} {b}" for a, b in merges],
        },
    }
    words = [token.replace("Ġ", " ") for token in vocabulary if len(token) > 1 and token[0] == "Ġ"]
    return tokenizer, words


# ---------------------------------------------------------------- server


@dataclass(frozen=True, slots=True)
class Fronts:
    """Instance counts of Triton's models, and sender threads; None: as in the repository."""

    llm: int | None = None
    tokenizer: int | None = None
    detokenizer: int | None = None
    sender_threads: int | None = None

    def apply(self, models: Path) -> None:
        for name in ("llm", "tokenizer", "detokenizer"):
            count = getattr(self, name)
            if count is None:
                continue
            path = models / name / "config.pbtxt"
            text, found = re.subn(
                r"(instance_group\b.*count: )\d+", rf"\g<1>{count}", path.read_text()
            )
            if not found:
                sys.exit(f"{path} has no instance_group")
            if name == "detokenizer" and count > 1:  # or a stream's responses are reordered
                text += "dynamic_batching { preserve_ordering: true }\n"
            path.write_text(text)
        if self.sender_threads is not None:
            with open(models / "llm" / "config.pbtxt", "a") as file:
                value = f'{{ string_value: "{self.sender_threads}" }}'
                file.write(f'parameters {{ key: "sender_threads" value {value} }}\n')


@contextlib.contextmanager
def serve(models: Path, log: Path) -> Iterator[tuple[str, engine_client.EngineClient]]:
    """Run a server on free ports of 127.0.0.1; yields its gRPC address and an engine observer."""
    server = Server([models], ports=(0, 0, 0), log_file=log)
    try:
        server.start()
        server.wait_ready(START_TIMEOUT_S)
        path = engine_client.socket_path(models / "llm", server.pid)
        engine = engine_client.attach(path, "observer")
        yield server.endpoints.grpc, engine
        engine.close()
        server.stop()
    except InflightError:
        if log.exists():
            sys.stderr.write("".join(log.read_text(errors="replace").splitlines(True)[-60:]))
        raise
    finally:
        server.kill()


# ---------------------------------------------------------------- load


def find_perf_analyzer(named: str | None) -> str:
    """The named perf_analyzer, or the first one on PATH that runs and can count requests.

    A script on PATH may refer to another machine's Python, and a wheel may need a newer glibc.
    """
    found = [Path(folder, "perf_analyzer") for folder in os.get_exec_path()]
    for path in [Path(named)] if named else found:
        with contextlib.suppress(OSError):
            command = [str(path), "--request-count", "1", "--version"]
            if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                return str(path)
    sys.exit(
        f"{named or 'PATH'}: no perf_analyzer that runs and knows --request-count; "
        "with glibc 2.38 or newer: pip install perf-analyzer==2.60.0"
    )


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one shape, the program that sends them, and a folder for its files."""

    input_len: int
    output_len: int
    program: str
    folder: Path

    def prompts(self, model: str, count: int, words: list[str], vocab_size: int) -> Path:
        """perf_analyzer's input: `count` prompts of random words, or of random ids for `llm`."""
        rng = random.Random(count)
        options = {"max_tokens": [self.output_len], "ignore_eos": [True], "stream": [True]}
        data: list[dict[str, Any]] = []
        for _ in range(count):
            if model == "llm":
                ids = [rng.randrange(vocab_size) for _ in range(self.input_len)]
                prompt = {"input_ids": {"content": ids, "shape": [self.input_len]}}
            else:
                prompt = {"text_input": ["".join(rng.choices(words, k=self.input_len))]}
            data.append({**prompt, **options})
        path = self.folder / f"{model}-{count}.json"
        path.write_text(json.dumps({"data": data}))
        return path

    def run(self, model: str, url: str, data: Path, streams: int) -> dict[str, float]:
        """Send one request per stream, all at once.

        Returns:
            seconds: from the first request to the last response.
            ttft_ms: median time from a request to its first response.
        """
        export = self.folder / "export.json"
        export.unlink(missing_ok=True)  # perf_analyzer refuses to overwrite it
        done = subprocess.run(
            [
                *(self.program, "-m", model, "-u", url, "-i", "grpc", "--streaming", "--async"),
                *("--concurrency-range", str(streams), "--request-count", str(streams)),
                *("--input-data", str(data), "--profile-export-file", str(export)),
            ],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=RUN_TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0 or re.search(r"\b(error|failed)\b", done.stdout, re.IGNORECASE):
            # The error is at one end and the usage at the other; which is where varies.
            text = (
                done.stdout if len(done.stdout) < 3000 else done.stdout[:999] + done.stdout[-999:]
            )
            sys.exit(f"perf_analyzer ended with {done.returncode}:\n{text}")
        return read_export(export, streams)


def read_export(path: Path, streams: int) -> dict[str, float]:
    """See `Load.run`."""
    # The export contains outputs as raw bytes.
    profile = json.loads(path.read_text(encoding="latin-1"))
    requests = profile["experiments"][0]["requests"]
    if len(requests) != streams:
        sys.exit(f"perf_analyzer reports {len(requests)} requests, not {streams}")
    first = min(request["timestamp"] for request in requests)
    last = max(request["response_timestamps"][-1] for request in requests)
    waits = [request["response_timestamps"][0] - request["timestamp"] for request in requests]
    return {"seconds": (last - first) * 1e-9, "ttft_ms": statistics.median(waits) * 1e-6}


def measure(  # one measurement has this many facts
    model: str,
    url: str,
    data: Path,
    streams: int,
    load: Load,
    engine: engine_client.EngineClient,
    num_runs: int,
) -> dict[str, Any]:
    """The row of a model that is reached at `url`, after a run that warms up."""
    print(f"{model} at {url}, {streams} streams", file=sys.stderr, flush=True)
    load.run(model, url, data, streams)
    runs = []
    for _ in range(num_runs):
        before = wait_until_idle(engine)
        runs.append(load.run(model, url, data, streams))
        made = wait_until_idle(engine) - before
        if made != streams * load.output_len:
            sys.exit(f"{made} tokens came out, not {streams * load.output_len}")
    return row(model, streams, load, runs)


def wait_until_idle(engine: engine_client.EngineClient) -> int:
    """Wait until no request is left; returns the output tokens since the engine's start."""
    while True:
        stats = engine.stats()
        if stats.num_running + stats.num_waiting + stats.num_suspended == 0:
            return stats.num_output_tokens
        time.sleep(0.01)


# ---------------------------------------------------------------- figures


def row(name: str, streams: int, load: Load, runs: list[dict[str, float]]) -> dict[str, Any]:
    seconds = [run["seconds"] for run in runs]
    best = min(seconds)
    found: dict[str, Any] = {"row": name, "streams": streams}
    found["out_tok_s"] = round(streams * load.output_len / best, 1)
    found["ms_per_token"] = round(best * 1e3 / load.output_len, 4)
    if "ttft_ms" in runs[0]:
        found["ttft_ms"] = round(min(run["ttft_ms"] for run in runs), 2)
    found["spread"] = round((max(seconds) / best - 1) * 100, 2)
    found["seconds"] = [round(value, 4) for value in seconds]
    return found


def compare(rows: list[dict[str, Any]], with_peer: bool) -> None:
    """Add to each row its share of the engine's throughput, or its extra time per token."""
    own = {found["streams"]: found for found in rows if found["row"] == "engine"}
    for found in rows:
        name, streams = found["row"], found["streams"]
        if name == "engine":
            continue
        if streams == 1:
            extra = (found["ms_per_token"] - own[1]["ms_per_token"]) * 1e3
            found["extra_us"] = round(extra, 1)
            if name not in MUST:
                continue
            found["must"] = f"+{MAX_EXTRA_US:g} us"
            found["verdict"] = "must" if extra <= MAX_EXTRA_US else "below"
        else:
            share = found["out_tok_s"] / own[streams]["out_tok_s"]
            found["share"] = round(share, 4)
            if name not in MUST:
                continue
            found["must"] = f"{MUST[name]:.0%}"
            found["verdict"] = "must" if share >= MUST[name] else "below"
            if name in GOAL:
                found["goal"] = f"{GOAL[name]:.0%}"
                found["verdict"] = "goal" if share >= GOAL[name] else found["verdict"]
        if with_peer and name == "generate" and streams in PEER:
            found["vllm_backend"] = PEER[streams]


def show(rows: list[dict[str, Any]]) -> None:
    for found in rows:
        figures = [f"{found['row']:9} {found['streams']:4} streams"]
        figures.append(f"{found['out_tok_s']:10,.1f} tok/s {found['ms_per_token']:8.3f} ms/token")
        for name, text in (("share", "{:.1%} of the engine"), ("extra_us", "{:+.0f} us a token")):
            if name in found:
                figures.append(text.format(found[name]))
        for name in ("must", "goal", "verdict", "vllm_backend"):
            if name in found:
                figures.append(f"{name} {found[name]}")
        print("  ".join(figures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=alone.MODEL, help="folder with a config.json")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument("--input-len", type=int, default=INPUT_LEN)
    parser.add_argument("--output-len", type=int, default=OUTPUT_LEN)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--set", action="append", metavar="KEY=VALUE", default=[])
    parser.add_argument("--llm-fronts", type=int, help="instances of the model llm")
    parser.add_argument("--tokenizers", type=int, help="instances of the model tokenizer")
    parser.add_argument("--detokenizers", type=int, help="instances of the model detokenizer")
    parser.add_argument("--sender-threads", type=int, help="sender threads per instance of llm")
    parser.add_argument("--grpc-door", action="store_true", help="also through the gRPC door")
    parser.add_argument("--perf-analyzer", help="path; default: the first on PATH that works")
    parser.add_argument("--log", type=Path, help="where to write tritonserver's log")
    parser.add_argument("--result", type=Path, help="where to write the result")
    options = parser.parse_args()

    program = find_perf_analyzer(options.perf_analyzer)
    fronts = Fronts(
        options.llm_fronts, options.tokenizers, options.detokenizers, options.sender_threads
    )
    with tempfile.TemporaryDirectory(prefix="inflight-serving-") as temporary:
        folder = Path(temporary)
        model, models = folder / "model", folder / "models"
        load = Load(options.input_len, options.output_len, program, folder)
        words = make_model(options.model, model)

        sizes = [1, options.streams]
        lengths = f"{options.input_len}/{options.output_len}"
        names = [f"{streams}x{lengths}" for streams in sizes]
        report = alone.measure(
            [
                *("--model", str(model), "--device", options.device, "--rows", ",".join(names)),
                *("--runs", str(options.runs)),
                *(word for pair in options.set for word in ("--set", pair)),
            ]
        )
        rows = [
            row("engine", streams, load, [{"seconds": value} for value in found["seconds"]])
            for streams, found in zip(sizes, report.rows, strict=True)
        ]
        settings = {key: value for key, value in report.settings.items() if key != "model"}
        repository.init(str(model), models, settings=settings)
        fronts.apply(models)
        log = options.log or folder / "tritonserver.log"
        with serve(models, log) as (url, engine):
            for name, streams in itertools.product(("llm", "generate"), sizes):
                data = load.prompts(name, streams, words, engine.welcome.vocab_size)
                rows.append(measure(name, url, data, streams, load, engine, options.runs))
            if options.grpc_door:
                with servers.door("grpc", url, folder) as address:
                    for streams in sizes:
                        data = load.prompts("generate", streams, words, engine.welcome.vocab_size)
                        found = measure(
                            "generate", address, data, streams, load, engine, options.runs
                        )
                        rows.append({**found, "row": GUARDED})
    rows.sort(key=lambda found: -found["streams"])
    compare(rows, with_peer=options.model.resolve() == alone.MODEL)
    show(rows)
    if options.result:
        result.write(
            options.result,
            "serving",
            rows,
            workload=f"{lengths} tokens per request, gRPC streams, all sent at once",
            machine=alone.machine(report.device),
            versions=report.versions,
            settings={"model": options.model.name, **settings},
            fronts={name: getattr(fronts, name) for name in Fronts.__slots__},
        )


if __name__ == "__main__":
    main()
