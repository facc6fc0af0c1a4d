"""`inflight quantize`: writes a checkpoint with weights of 8 or 4 bits."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from inflight.checkpoint.locate import locate
from inflight.errors import ConfigError
from inflight.models.loader import linear_names
from inflight.models.quantization.compressed import KINDS
from inflight.models.quantization.recognition import format_of
from inflight.models.quantization.writer import quantize_folder
from inflight.models.registry import read_spec


def run(model: str, target: Path, kind: str, *, as_json: bool) -> None:
    """Quantise a model, and print what was written.

    Args:
        model: a Hugging Face folder, or the name of a downloaded model.
        target: the folder to write.
        kind: fp8, int8 or int4.
        as_json: print one JSON object.

    Raises:
        ConfigError: the model is not supported, is quantised already, or has no folder; the target
            exists or cannot be written.
    """
    if kind not in KINDS:
        raise ConfigError(f"--format {kind} is unknown; allowed: {', '.join(KINDS)}")
    checkpoint = locate(model)
    if checkpoint.format != "huggingface":
        raise ConfigError(
            f"{checkpoint.path} is a GGUF file; quantize the Hugging Face folder of the model"
        )
    spec = read_spec(checkpoint)
    found = format_of(checkpoint.path)
    if found is not None:
        raise ConfigError(
            f"{checkpoint.path} is quantised already ({found.name}); quantize the model with 16 "
            "bits that it was made from"
        )
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("quantising", total=1.0)
        written = quantize_folder(
            checkpoint.path,
            target,
            linear_names(spec),
            kind,
            lambda fraction: bars.update(task, completed=fraction),
        )
    if as_json:
        typer.echo(json.dumps({"path": str(target), "format": kind} | asdict(written)))
        return
    before, after = written.bytes_before / 1e6, written.bytes_after / 1e6
    typer.echo(
        f"{target}: {written.num_quantized} of {written.num_tensors} tensors in {kind.upper()}, "
        f"{after:,.1f} MB instead of {before:,.1f} MB"
    )
    typer.echo(f"next: inflight serve {target}", err=True)
