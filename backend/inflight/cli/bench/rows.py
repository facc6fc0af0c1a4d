"""The workloads: number and lengths of requests, and the metrics computed from their time."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from inflight.core.request import Request
from inflight.errors import ConfigError, did_you_mean
from inflight.sampling.params import SamplingParams

Metric = Literal["out_tok_s", "prompt_tok_s", "ready_s"]

_CUSTOM = re.compile(r"([1-9]\d*)x([1-9]\d*)/([1-9]\d*)")


@dataclass(frozen=True, slots=True)
class Row:
    """Requests that are submitted at once and run to completion.

    Attributes:
        input_len, output_len: tokens of each request.
        num_runs: number of measured runs; the best one counts.
    """

    name: str
    num_requests: int
    input_len: int
    output_len: int
    num_runs: int = 2

    @property
    def workload(self) -> str:
        return f"{self.num_requests} x {self.input_len}/{self.output_len}"

    @property
    def metric(self) -> Metric:
        """The main metric of the row."""
        return "prompt_tok_s" if self.output_len == 1 else "out_tok_s"

    def scaled(self, factor: float) -> Row:
        """The row with all three numbers scaled; a single output token stays one."""
        return dataclasses.replace(
            self,
            num_requests=max(1, round(self.num_requests * factor)),
            input_len=max(1, round(self.input_len * factor)),
            output_len=1 if self.output_len == 1 else max(2, round(self.output_len * factor)),
        )

    def requests(self, vocab_size: int, first_id: int) -> list[Request]:
        """Random prompts, deterministic per row; greedy, EOS ignored.

        Args:
            vocab_size: token ids are below it.
            first_id: first request id.
        """
        random = np.random.default_rng(self.num_requests)
        shape = (self.num_requests, self.input_len)
        prompts = random.integers(vocab_size, size=shape).tolist()
        params = SamplingParams(max_tokens=self.output_len, temperature=0.0, ignore_eos=True)
        return [Request(first_id + i, prompt, params) for i, prompt in enumerate(prompts)]

    def figures(self, seconds: Sequence[float]) -> dict[str, Any]:
        """Metrics of the runs.

        Returns:
            Tokens per second and milliseconds per token of each request, of the best run; `spread`,
            how much longer the slowest run took, in percent; `seconds` of all runs.
        """
        best = min(seconds)
        num_out, num_in = (
            self.num_requests * length for length in (self.output_len, self.input_len)
        )
        found: dict[str, Any] = {"out_tok_s": round(num_out / best, 2)}
        if self.output_len > 1:
            found["ms_per_token"] = round(best * 1e3 / self.output_len, 4)
        else:
            found["prompt_tok_s"] = round(num_in / best, 1)
        found["total_tok_s"] = round((num_in + num_out) / best, 1)
        found["spread"] = round((max(seconds) / best - 1) * 100, 2)
        found["seconds"] = [round(value, 4) for value in seconds]
        return found


ROWS = (
    Row("bs1", 1, 128, 512),
    Row("bs64", 64, 16, 500),
    Row("chat256", 256, 512, 256),
    Row("chat1000", 1000, 512, 256),
    Row("decode256", 256, 128, 2048, num_runs=1),
    Row("prefill", 32, 4096, 1),
    Row("long", 16, 8192, 256, num_runs=1),
)
START = "start"
"""Not a workload: seconds from process start to a ready engine."""


def select(names: str) -> tuple[list[Row], bool]:
    """The rows of a comma-separated list, and whether `start` is among them.

    Args:
        names: of ROWS, `start`, `all`, or a custom workload: REQUESTSxINPUT/OUTPUT.

    Raises:
        ConfigError: a name is unknown.
    """
    known = {row.name: row for row in ROWS}
    rows: list[Row] = []
    start = False
    for name in names.split(","):
        custom = _CUSTOM.fullmatch(name)
        if name == "all":
            rows += ROWS
            start = True
        elif name == START:
            start = True
        elif name in known:
            rows.append(known[name])
        elif custom is not None:
            rows.append(Row(name, *(int(number) for number in custom.groups())))
        else:
            names_known = (*known, START, "all")
            raise ConfigError(
                f"rows: {name!r} is unknown; allowed: {', '.join(names_known)} and "
                f"REQUESTSxINPUT/OUTPUT{did_you_mean(name, names_known)}"
            )
    return rows, start
