"""Sampling from a vocabulary of 128256, for 1 to 256 rows, against torch's own operations.

    PYTHONPATH=benchmarks python benchmarks/kernels/bench_sampling.py [--json FILE]

`tb_per_s` counts one read of the logits, the minimum, and `of_ceiling` is its fraction of the
bandwidth of a pass over 1 GiB; with few rows the logits come from L2, as in a model. Logits are
normal with a standard deviation of 3; `flat` ones have 1, where a nucleus of 0.9 keeps tens of
thousands of tokens. `torch_us` is an argmax for greedy rows, a softmax and an exponential race for
plain draws, and for the others a sort and two masks before the race. All are captured in the same
way, except that those with a sort, which take milliseconds, are a single call and a few replays;
null where torch has no equivalent. `top 5 of greedy` is a greedy choice plus the five most probable
tokens of each row. See timing.py for the method.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import timing
import torch

from inflight_kernels.ops.sampling import (
    MAX_TOP,
    ROW_PARAMS,
    LogitBias,
    PenaltyState,
    SamplingInputs,
    SamplingOutputs,
    TokenMasks,
    TopLogprobsOutputs,
    Workspace,
    greedy_row_params,
    prompt_words,
    sample,
    top_logprobs,
)

VOCAB = 128256
ROWS = (1, 16, 64, 256)
DTYPES = (torch.bfloat16, torch.float32)
# name: (standard deviation of the logits, options)
CASES: dict[str, tuple[float, dict[str, float]]] = {
    "greedy": (3.0, {}),
    "greedy, penalties": (3.0, {"repetition_penalty": 1.1, "frequency_penalty": 0.1}),
    "greedy, 300 biases": (3.0, {"biases": 300}),
    "greedy, mask": (3.0, {"mask": 1}),
    "top 5 of greedy": (3.0, {"top": 5}),
    "plain": (3.0, {"temperature": 0.8}),
    "top_k 50": (3.0, {"temperature": 0.8, "top_k": 50}),
    "top_k 50, top_p 0.9": (3.0, {"temperature": 0.8, "top_k": 50, "top_p": 0.9}),
    "top_k 50, top_p 0.9, flat": (1.0, {"temperature": 1.0, "top_k": 50, "top_p": 0.9}),
    "top_p 0.9": (3.0, {"temperature": 0.7, "top_p": 0.9}),
    "min_p 0.05": (3.0, {"temperature": 0.8, "min_p": 0.05}),
    "top_p 0.9, flat": (1.0, {"temperature": 1.0, "top_p": 0.9}),
    "typical_p 0.9": (3.0, {"temperature": 0.7, "typical_p": 0.9}),
    "top_n_sigma 1": (3.0, {"temperature": 0.8, "top_n_sigma": 1.0}),
    "min_p 0.05, xtc": (
        3.0,
        {"temperature": 0.8, "min_p": 0.05, "xtc_probability": 0.5, "xtc_threshold": 0.1},
    ),
}

RARE = {"typical_p", "top_n_sigma", "xtc_probability"}
FILTERS = {"top_k", "top_p", "min_p", *RARE}
# Not compared with torch.
SPECIAL = {"biases", "mask", "top", *RARE}

_PEER_REPLAYS = 5

Call = Callable[[], object]


def inputs_of(n: int, options: dict[str, float]) -> SamplingInputs:
    """Sampling inputs of n rows."""
    rows = greedy_row_params(n)
    for name, value in options.items():
        if name in ROW_PARAMS.fields:
            rows[name] = value
    rows["seed"] = np.arange(n)
    rows["slot"] = np.arange(n)
    words = prompt_words(VOCAB)
    penalties = bias = masks = None
    if "biases" in options:
        number = int(options["biases"])
        ids = np.sort(np.random.default_rng(0).choice(VOCAB, (n, number)), axis=1)
        bias = LogitBias(
            torch.arange(n + 1, dtype=torch.int32, device="cuda") * number,
            torch.from_numpy(ids.astype(np.int32).ravel()).cuda(),
            torch.ones(n * number, device="cuda"),
        )
    if "mask" in options:
        masks = TokenMasks(
            torch.full((n, words), 0x55555555, dtype=torch.int32, device="cuda"),
            torch.arange(n, dtype=torch.int32, device="cuda"),
        )
    if "repetition_penalty" in options:
        penalties = PenaltyState(
            torch.zeros(n, VOCAB, dtype=torch.int16, device="cuda"),
            torch.zeros(n, words, dtype=torch.int32, device="cuda"),
        )
    row_params = torch.from_numpy(rows.view(np.uint8).reshape(n, -1)).cuda()
    return SamplingInputs(row_params, torch.arange(n, device="cuda"), penalties, bias, masks)


def ours(n: int, dtype: torch.dtype, case: str) -> Callable[[], Call]:
    deviation, options = CASES[case]
    inputs = inputs_of(n, options)
    workspace = Workspace(n, VOCAB, "cuda")

    def make() -> Call:
        logits = (torch.randn(n, VOCAB, device="cuda") * deviation).to(dtype)
        sampled = SamplingOutputs(
            torch.empty(n, dtype=torch.int64, device="cuda"),
            torch.empty(n, dtype=torch.float32, device="cuda"),
            torch.empty(n, dtype=torch.int32, device="cuda"),
        )
        wanted = torch.full((n,), int(options.get("top", -1)), dtype=torch.int32, device="cuda")
        found = TopLogprobsOutputs(
            torch.empty(n, MAX_TOP, dtype=torch.int32, device="cuda"),
            torch.empty(n, MAX_TOP, device="cuda"),
            torch.empty(n, device="cuda"),
            torch.empty(n, dtype=torch.int32, device="cuda"),
        )
        filters, rare = bool(options.keys() & FILTERS), bool(options.keys() & RARE)

        def call() -> None:
            sample(logits, inputs, workspace, sampled, filters=filters, rare=rare, pdl=True)
            if "top" in options:
                top_logprobs(logits, wanted, workspace, sampled, found, pdl=True)

        return call

    return make


def torchs(n: int, dtype: torch.dtype, case: str) -> Callable[[], Call]:
    deviation, options = CASES[case]

    def race(scores: torch.Tensor) -> torch.Tensor:
        probabilities = torch.softmax(scores, -1, dtype=torch.float32)
        return probabilities.div_(torch.empty_like(probabilities).exponential_()).argmax(-1)

    def filtered(logits: torch.Tensor) -> torch.Tensor:
        scores, ids = torch.sort(logits.float() / options["temperature"], -1, descending=True)
        if "top_k" in options:
            scores[:, int(options["top_k"]) :] = -torch.inf
        masses = torch.softmax(scores, -1)
        kept = masses.cumsum(-1) - masses < options.get("top_p", 1.0)
        kept &= masses >= options.get("min_p", 0.0) * masses[:, :1]
        picks = race(scores.masked_fill_(~kept, -torch.inf))
        return ids.gather(1, picks.unsqueeze(1))

    def make() -> Call:
        logits = (torch.randn(n, VOCAB, device="cuda") * deviation).to(dtype)
        if "temperature" not in options:
            return lambda: logits.argmax(-1)
        if case == "plain":
            return lambda: race(logits.float() / options["temperature"])
        return lambda: filtered(logits)

    return make


def _torch_us(n: int, dtype: torch.dtype, case: str, num_bytes: int) -> float | None:
    if CASES[case][1].keys() & SPECIAL:
        return None
    make = torchs(n, dtype, case)
    if not CASES[case][1].keys() & FILTERS:
        return timing.measure(make, num_bytes).median
    call = make()
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(_PEER_REPLAYS):
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(started.elapsed_time(ended) * 1e3)
    return statistics.median(times)


def _rows() -> Iterator[dict[str, Any]]:
    ceiling = timing.copy_ceiling()
    yield ceiling
    for dtype in DTYPES:
        for case in CASES:
            for n in ROWS:
                num_bytes = n * VOCAB * dtype.itemsize
                found = timing.measure(ours(n, dtype, case), num_bytes)
                fields = found.row(num_bytes)
                torch_us = _torch_us(n, dtype, case, num_bytes)
                yield {
                    "op": case,
                    "n": n,
                    "dtype": str(dtype),
                    **fields,
                    "of_ceiling": round(fields["tb_per_s"] / ceiling["tb_per_s"], 3),
                    "torch_us": None if torch_us is None else round(torch_us, 2),
                }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the rows")
    timing.report("sampling", _rows(), parser.parse_args().json)


if __name__ == "__main__":
    main()
