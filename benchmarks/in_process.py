"""Parts of scripts that run an engine in their own process: options, random tokens, results."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import result

MODEL = result.ROOT / "benchmarks/models/llama-3.1-8b"


class RandomTokens:
    """Random token ids below vocab_size, the same in each run."""

    def __init__(self, vocab_size: int) -> None:
        self._random = np.random.default_rng(1)
        self._vocab_size = vocab_size

    def draw(self, count: int) -> list[int]:
        found: list[int] = self._random.integers(self._vocab_size, size=count).tolist()
        return found


def add_options(
    parser: argparse.ArgumentParser, model: str = str(MODEL), device: str = "cuda"
) -> None:
    """The options of all such scripts, with these defaults."""
    parser.add_argument("--model", default=model)
    parser.add_argument("--device", default=device)
    parser.add_argument("--result", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")


def changes(pairs: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE pairs as settings; a value is JSON if it parses, otherwise a string."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, _, text = pair.partition("=")
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
    return found


def write(
    args: argparse.Namespace, benchmark: str, rows: list[dict[str, Any]], **facts: Any
) -> None:
    """Write the rows to --result, if it was given."""
    if args.result is not None:
        machine = result.cpu() if args.device in ("cpu", "echo") else result.gpu()
        result.write(args.result, benchmark, rows, machine=machine, **facts)
