"""Computes the kernel times of a step from a Chrome trace of torch.profiler.

Kernels in a CUDA graph are in the trace like all others. A trace without device activity is one of
a CPU; there the outermost ops count as kernels.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from inflight.errors import EngineError

_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_CPU = {"cpu_op"}

GAP = "gap"
OTHER = "other"
# Searched in the shortened name, then in the full one, in this order; the first match wins.
_GROUPS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (group, re.compile(pattern, re.IGNORECASE))
    for group, pattern in (
        ("copies", r"memcpy|memset|copy_blocks|clear_slots|copy_kernel|aten::(copy|clone|fill)_?$"),
        ("attention", r"attend|^plan$|attention|flash|fmha"),
        (
            "sampling",
            r"^(scan|gather|count_output_tokens|mark_prompt_tokens)$"
            r"|sampl|argmax|greedy|penalt|multinomial|softmax",
        ),
        ("batch state", r"^(begin|end)_step$|^write_(tables|row_params)$"),
        (
            "experts",
            r"^few_(gate_up|down)|^score_|expert|^route|gather(ed)?_rows$|sum_rms_norm|^moe",
        ),
        (
            "linear",
            r"gemm|gemv|^grouped_|matmul|nvjet|cutlass|cublas|splitk|linear|aten::(add)?mm$",
        ),
        ("norm, rope, activation", r"norm|rope|rotary|silu|gelu|embedding"),
    )
)
GROUPS = (
    "linear",
    "experts",
    "attention",
    "norm, rope, activation",
    "sampling",
    "batch state",
    "copies",
)


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kernel's time in a step.

    Attributes:
        name: shortened.
        group: one of GROUPS, or `other`.
        calls, us: per step.
        share: of the step, in [0, 1].
    """

    name: str
    group: str
    calls: float
    us: float
    share: float


@dataclass(frozen=True, slots=True)
class StepProfile:
    """A step, averaged over the traced ones.

    Attributes:
        kind: of the step: `decode`, `prefill`.
        num_steps: number of steps in the trace.
        step_us: from the first kernel's start to the last one's end, per step.
        gap_us: part of it in which no kernel ran. Of n steps, n - 1 include the gap to the next.
        kernels: longest first. Overlapping time counts for the kernel that started first, so that
            kernels and gap add up to step_us.
        untraced_us: duration of a step without tracing, by the host's clock: tracing slows the
            host down, so without it the gap is smaller by the difference.
    """

    kind: str
    num_steps: int
    step_us: float
    gap_us: float
    kernels: list[KernelTime]
    untraced_us: float

    def groups(self) -> dict[str, float]:
        """Microseconds per step by group, the gap last; empty groups are omitted."""
        found: dict[str, float] = defaultdict(float)
        for kernel in self.kernels:
            found[kernel.group] += kernel.us
        found[GAP] = self.gap_us
        order = (*GROUPS, OTHER, GAP)
        return {group: round(found[group], 3) for group in order if found[group] > 0}


@dataclass(frozen=True, slots=True)
class Profile:
    """The steps of one row.

    Attributes:
        device: name of the GPU, or `cpu`.
        steps: decode, then prefill.
    """

    row: str
    workload: str
    device: str
    steps: list[StepProfile]

    def as_json(self) -> dict[str, Any]:
        found = asdict(self)
        for raw, step in zip(found["steps"], self.steps, strict=True):
            raw["groups"] = step.groups()
        return found


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a Chrome trace."""
    raw = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    events: list[dict[str, Any]] = raw["traceEvents"] if isinstance(raw, dict) else raw
    return events


def aggregate(
    events: Iterable[dict[str, Any]], kind: str, num_steps: int, untraced_us: float
) -> StepProfile:
    """Aggregate a trace of exactly `num_steps` equal steps.

    Raises:
        EngineError: the trace has no kernel and no op.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    spans = [event for event in complete if event.get("cat") in _DEVICE]
    if not spans:
        spans = [event for event in complete if event.get("cat") in _CPU]
    if not spans:
        raise EngineError("the trace contains no kernel and no op")
    spans.sort(key=lambda event: (event["ts"], -event["dur"]))
    calls: dict[str, int] = defaultdict(int)
    busy: dict[str, float] = defaultdict(float)
    groups: dict[str, str] = {}
    first = covered = spans[0]["ts"]
    for event in spans:
        end = event["ts"] + event["dur"]
        if event["cat"] in _CPU and end <= covered:
            continue  # inside another op
        name = short(event["name"])
        calls[name] += 1
        groups.setdefault(name, group_of(event["name"]))
        busy[name] += max(0.0, end - max(covered, event["ts"]))
        covered = max(covered, end)
    step_us = (covered - first) / num_steps
    kernels = [
        KernelTime(
            name,
            groups[name],
            calls=round(calls[name] / num_steps, 2),
            us=round(us / num_steps, 3),
            share=round(us / num_steps / step_us, 4),
        )
        for name, us in sorted(busy.items(), key=lambda item: -item[1])
    ]
    gap = max(0.0, step_us - sum(busy.values()) / num_steps)
    return StepProfile(kind, num_steps, round(step_us, 3), round(gap, 3), kernels, untraced_us)


def group_of(name: str) -> str:
    """The group of a kernel, by its full name."""
    for text in (short(name), name):
        for group, pattern in _GROUPS:
            if pattern.search(text):
                return group
    return OTHER


def short(name: str) -> str:
    """`void ours::gemm<64, float>(Args)` -> `gemm`: no result, scopes, template or arguments."""
    name = _without_brackets(name.replace("(anonymous namespace)::", ""))
    name = name.split("(", 1)[0].strip()
    word = name.rsplit(" ", 1)[-1] if name.startswith(("void ", "auto ")) else name
    return word if word.startswith("aten::") else word.rsplit("::", 1)[-1] or name


def _without_brackets(name: str) -> str:
    kept, depth = [], 0
    for char in name:
        if char == "<":
            depth += 1
        elif char == ">":
            depth = max(0, depth - 1)
        elif depth == 0:
            kept.append(char)
    return "".join(kept)
