"""Time of a new user's first steps, from a fresh clone with empty caches to a stopped server.

    python benchmarks/first_minutes.py [--rounds N] [--json FILE]

Clones the committed state into a temporary folder, with a temporary home folder, and measures:
`make demo` (installation, then a run), `make demo` again, `inflight serve` until READY, the first
token after READY, the steps that a request still computes after its client has disconnected
(through the model `llm` and through the ensemble), and Ctrl-C until exit. Reported are medians with
minimum and maximum; the first `make demo` runs only once per clone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import result

# Runs in the clone's interpreter, where the modules to attach to the engine are installed.
CANCEL_STEPS = """
import json, sys, time
from pathlib import Path
sys.path.insert(0, "tests/support")
from inflight.ipc import engine_client
from kserve import Stream, request, tensor, text
url, pid, models = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
engine = engine_client.attach(engine_client.socket_path(models / "llm", pid), "observer")
options = [tensor("stream", "BOOL", True), tensor("ignore_eos", "BOOL", True),
           tensor("max_tokens", "INT32", 8000)]
messages = {"llm": request("llm", tensor("input_ids", "INT32", [504, 3575, 282]), *options),
            "ensemble": request("generate", text("The capital of"), *options)}
found = {name: {"steps": [], "seconds": []} for name in messages}
for _ in range(10):
    for name, message in messages.items():
        stream = Stream(url, message)
        for _ in range(10):
            stream.next()
        before, started = engine.stats().num_steps, time.perf_counter()
        stream.cancel()
        while (stats := engine.stats()).num_free_blocks < stats.num_blocks:
            time.sleep(0.001)
        found[name]["seconds"].append(time.perf_counter() - started)
        found[name]["steps"].append(stats.num_steps - before)
engine.close()
print(json.dumps(found))
"""


def run(command: list[str], clone: Path, environment: dict[str, str]) -> tuple[float, str]:
    started = time.perf_counter()
    done = subprocess.run(
        command, cwd=clone, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    output = done.stdout.decode(errors="replace")
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{output[-3000:]}")
    return time.perf_counter() - started, output


def serve(clone: Path, environment: dict[str, str]) -> dict[str, Any]:
    """One server from start to Ctrl-C."""
    inflight = str(clone / ".venv/bin/inflight")
    ports = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0", "--gateway-port", "0"]
    started = time.perf_counter()
    process = subprocess.Popen(
        [inflight, "serve", *ports],
        cwd=clone,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    printed = ""
    while "READY" not in printed:
        printed += process.stdout.readline().decode()
    ready = time.perf_counter() - started
    while not (found := re.search(r"gRPC\s+(127\.0\.0\.1:\d+)", printed)):
        printed += process.stdout.readline().decode()
    url = found.group(1)
    _, answer = run(
        [inflight, "generate", "The capital of France is", "--url", url, "--json"],
        clone,
        environment,
    )
    models = clone / "model_repository"
    python = str(clone / ".venv/bin/python")
    _, cancels = run(
        [python, "-c", CANCEL_STEPS, url, str(process.pid), str(models)], clone, environment
    )
    started = time.perf_counter()
    process.send_signal(signal.SIGINT)
    process.communicate()
    if process.returncode != 0:
        sys.exit(f"inflight serve ended with {process.returncode}")
    return {
        "ready_s": ready,
        "first_token_s": json.loads(answer)["ttft_s"],
        "stop_s": time.perf_counter() - started,
        "cancel": json.loads(cancels.strip().splitlines()[-1]),
    }


def summary(name: str, values: list[float]) -> dict[str, Any]:
    row = {"row": name, **result.spread(values), "runs": len(values)}
    print(f"{name:34} {row['median']:8.3f} [{row['min']:.3f} .. {row['max']:.3f}]")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where to write the result")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        clone, home = Path(folder, "clone"), Path(folder, "home")
        home.mkdir()
        subprocess.run(["git", "clone", "--quiet", str(result.ROOT), str(clone)], check=True)
        commit = result.commit(clone)
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("XDG_", "INFLIGHT_", "VIRTUAL_ENV", "PYTHON"))
        } | {"HOME": str(home), "PIP_NO_CACHE_DIR": "1"}
        rows.append(
            summary("make demo, fresh clone, s", [run(["make", "demo"], clone, environment)[0]])
        )
        again = [run(["make", "demo"], clone, environment)[0] for _ in range(options.rounds)]
        rows.append(summary("make demo, again, s", again))
        servers = [serve(clone, environment) for _ in range(options.rounds)]
    for key in ("ready_s", "first_token_s", "stop_s"):
        rows.append(summary(f"inflight serve, {key}", [server[key] for server in servers]))
    for way in ("llm", "ensemble"):
        for what in ("steps", "seconds"):
            values = [value for server in servers for value in server["cancel"][way][what]]
            rows.append(summary(f"cancel through {way}, {what}", values))
    if options.json:
        versions = {"python": platform.python_version(), "system": platform.platform()}
        result.write(options.json, "first_minutes", rows, versions=versions, commit=commit)


if __name__ == "__main__":
    main()
