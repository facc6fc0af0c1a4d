"""The kernels' tests under compute-sanitizer, which detects out-of-bounds accesses and races.

    PYTHONPATH=benchmarks python benchmarks/kernels/sanitize.py [--json FILE]

Both tools slow launches down too much to run every case: memcheck runs every nth case of each test;
racecheck, which takes seconds per launch, runs one or a few cases per kernel. Only our own kernels
are checked, not torch's. The exit status is 1 if an error is found or a test fails.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import result

TESTS = result.ROOT / "tests/kernels/gpu"
KERNELS = result.ROOT / "kernels/inflight_kernels/csrc"
SUMMARIES = {
    "memcheck": re.compile(r"ERROR SUMMARY: (\d+) errors?"),
    "racecheck": re.compile(r"RACECHECK SUMMARY: (\d+) hazards?"),
}


@dataclass(frozen=True, slots=True)
class Job:
    """Tests that run in one process.

    Attributes:
        tool: a tool of compute-sanitizer.
        name: of the job.
        files: test_<file>.py each.
        every: run every nth case of each test.
        only: run the tests that match this expression of pytest's -k.
    """

    tool: str
    name: str
    files: tuple[str, ...]
    every: int = 1
    only: str = ""


SMALL = ("activation", "batch_state", "cache", "drafting", "embedding", "launch", "norm", "rope")
FIRST = 100_000
"""As `every`: only the first case of each test."""

JOBS = (
    Job("memcheck", "attention", ("attention", "rope_attend"), 50),
    Job("memcheck", "products", ("skinny_gemm", "gemm", "weight_only"), 20),
    Job("memcheck", "products of 8 bits", ("scaled_linear", "scaled_rows"), 20),
    Job("memcheck", "results of 8 bits", ("quantizing_gate", "attention_quantizing"), 12),
    Job("memcheck", "keys and values of 8 bits", ("quantized_kv", "quantized_rope_attend"), 40),
    Job("memcheck", "experts", ("moe",), 60),
    Job("memcheck", "few tokens of experts", ("few_experts",), 40),
    Job("memcheck", "products of codes", ("grouped",), 40),
    Job("memcheck", "shared prefixes", ("cascade",), 12),
    Job("memcheck", "latent attention", ("latent", "latent_products"), 12),
    Job("memcheck", "sampling", ("sampling", "logit_adjustments"), 40),
    Job("memcheck", "other kernels", SMALL, 20),
    Job("racecheck", "attention, few rows", ("attention",), only="head_dim[decode-128-torch.bf"),
    Job("racecheck", "attention, rotated", ("rope_attend",), only="one[decode-28-4-128-torch.bfl"),
    Job("racecheck", "attention, rotated chunk", ("rope_attend",), FIRST, "chunk_is_rotated"),
    Job("racecheck", "attention, many sequences", ("attention",), only="sequences[short-128"),
    Job("racecheck", "attention, prompts", ("attention",), only="head_dim[mixed-128-torch.bf"),
    Job("racecheck", "attention, 8 bits", ("quantized_kv",), FIRST, "dequantised_values or first"),
    Job(
        "racecheck",
        "attention, results of 8 bits",
        ("attention_quantizing",),
        only="reproducible[with",
    ),
    Job("racecheck", "gate, results of 8 bits", ("quantizing_gate",), FIRST),
    Job("racecheck", "attention, rotated, 8 bits", ("quantized_rope_attend",), FIRST, "separate"),
    Job("racecheck", "products of 8 bits", ("scaled_linear",), FIRST, "operands or on_the_way"),
    Job("racecheck", "rows of 8 bits", ("scaled_rows",), FIRST),
    Job("racecheck", "experts", ("moe",), only="the_definition[130-60-4-72-136-zipf"),
    Job("racecheck", "experts, one cluster", ("moe",), only="the_definition[33-60-4-72-136-zipf"),
    Job("racecheck", "experts, sums", ("moe",), 30, "norm_of_sums"),
    Job("racecheck", "experts, codes", ("moe",), 47, "weights_in_records"),
    Job("racecheck", "experts, scaled", ("moe",), only="bias_and_gate[dtype1-300-1"),
    Job("racecheck", "few tokens of experts", ("few_experts",), FIRST),
    Job("racecheck", "products of codes, few tokens", ("grouped",), 5, "every_kind"),
    Job("racecheck", "products of codes, padding", ("grouped",), 9, "left_out"),
    Job("racecheck", "products of codes", ("grouped",), 9, "every_size_come"),
    Job("racecheck", "shared prefixes, few rows", ("cascade",), only="share_a_prefix[64-16"),
    Job("racecheck", "shared prefixes, many", ("cascade",), only="share_a_prefix[64-200"),
    Job("racecheck", "latent attention, few rows", ("latent",), only="lengths[2-16]"),
    Job("racecheck", "bytes, pairs of blocks", ("quantized_kv",), only="a_unit[0-0-(32"),
    Job("racecheck", "latent attention, pairs of blocks", ("latent",), only="a_unit[0-33-16]"),
    Job("racecheck", "latent attention, 20 heads", ("latent",), only="lengths[2-20]"),
    Job("racecheck", "latent attention, many rows", ("latent",), only="any_chunks[verify-16]"),
    Job("racecheck", "latent products", ("latent_products",), FIRST, "not ready_history"),
    Job("racecheck", "products of few tokens", ("skinny_gemm",), FIRST),
    Job("racecheck", "products of many tokens", ("gemm",), FIRST),
    Job("racecheck", "products of weights of 8 bits", ("weight_only",), FIRST),
    Job(
        "racecheck",
        "sampling",
        ("sampling", "logit_adjustments"),
        FIRST,
        "kinds_of or top_logprobs or exact_and",
    ),
    # Except a launch that overlaps the preceding one, on which the tool itself fails.
    Job("racecheck", "other kernels", SMALL, FIRST, "not ready_history"),
)


def own_kernels() -> list[str]:
    """Names of our kernels; compute-sanitizer matches them as substrings."""
    found = set()
    for path in KERNELS.rglob("*.cu"):
        for text in path.read_text().split("__global__")[1:]:
            words = re.sub(r"__\w+__\([^()]*(\([^()]*\)[^()]*)*\)", "", text)
            name = re.search(r"(\w+)\s*\(", words)
            if name is not None:
                found.add(name[1])
    return sorted(found)


def run(job: Job, limit: float, logs: Path | None) -> dict[str, Any]:
    """One row: what the tool found, if it finished within `limit` seconds."""
    command = ["compute-sanitizer", "--tool", job.tool, "--report-api-errors", "no"]
    for name in own_kernels():
        command += ["--kernel-name", f"kns={name}"]
    command += [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    command += os.environ.get("SANITIZE_PYTEST", "").split()
    command += [str(TESTS / f"test_{file}.py") for file in job.files]
    if job.only:
        command += ["-k", job.only]
    started = time.perf_counter()
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "INFLIGHT_TEST_EVERY": str(job.every)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit,
            check=False,
        )
        output = done.stdout
    except subprocess.TimeoutExpired as late:
        output = (late.stdout or b"").decode()
    if logs is not None:
        (logs / f"{job.tool}-{job.name.replace(', ', '-').replace(' ', '-')}.log").write_text(
            output
        )
    passed = re.search(r"(\d+) passed", output)
    summary = SUMMARIES[job.tool].search(output)
    return {
        "row": f"{job.tool}, {job.name}",
        "cases": int(passed[1]) if passed else None,
        "failed": bool(re.search(r"\b\d+ failed\b|\b\d+ errors? in \d", output)),
        "seconds": round(time.perf_counter() - started, 1),
        "found": int(summary[1]) if summary else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=float, default=600.0, help="time limit per job in seconds")
    parser.add_argument("--at-once", type=int, default=6, help="number of concurrent jobs")
    parser.add_argument("--only", default="", help="part of the jobs' names, such as racecheck")
    parser.add_argument("--logs", type=Path, help="folder for the output of jobs")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    options = parser.parse_args()
    jobs = [job for job in JOBS if options.only in f"{job.tool}, {job.name}"]
    rows = []
    with ThreadPoolExecutor(options.at_once) as pool:
        for row in pool.map(lambda job: run(job, options.limit, options.logs), jobs):
            print(row, flush=True)
            rows.append(row)
            if options.json is not None:
                result.write(options.json, "kernels, compute-sanitizer", rows, machine=result.gpu())
    clean = all(row["cases"] and not row["failed"] and row["found"] == 0 for row in rows)
    sys.exit(0 if clean else 1)


if __name__ == "__main__":
    main()
