"""`inflight bench engine`: times rows of requests, or profiles their steps."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import typer

from inflight.cli.bench import engine, profile
from inflight.cli.bench.rows import Row, select
from inflight.cli.bench.show import Show
from inflight.cli.options import BenchOptions


def run(options: BenchOptions, changes: dict[str, Any]) -> None:
    """Run what the options ask for, and print it.

    Args:
        changes: settings of engine.json, which override those for the rows.

    Raises:
        typer.BadParameter: an option is out of range.
        ConfigError: a row is unknown, or the model or a setting is not supported.
        InflightError: a request failed.
    """
    rows, start = select(options.rows)
    if options.scale <= 0 or (options.runs is not None and options.runs < 1) or options.steps < 1:
        raise typer.BadParameter("--scale, --runs and --steps must be positive")
    rows = [row.scaled(options.scale) for row in rows]
    settings = engine.engine_settings(options.model, options.device, rows, changes)
    if options.profile is None:
        _time(options, settings, rows, start)
    elif rows:
        _profile(options, settings, rows, options.profile)
    else:
        raise typer.BadParameter("--profile requires a row with requests")


def _time(options: BenchOptions, settings: dict[str, Any], rows: list[Row], start: bool) -> None:
    report = engine.run(
        settings,
        rows,
        start=start,
        num_runs=options.runs,
        on_progress=_show_progress,
        on_row=_print_report if options.json_ else lambda so_far: None,
    )
    if options.json_:
        _print_report(report)
    else:
        Show().report(report)


def _profile(
    options: BenchOptions, settings: dict[str, Any], rows: list[Row], folder: Path
) -> None:
    profiles = profile.run(settings, rows, options.steps, folder, on_progress=_show_progress)
    if options.json_:
        typer.echo(json.dumps([found.as_json() for found in profiles]))
    else:
        Show().profiles(profiles)


def _print_report(report: engine.Report) -> None:
    typer.echo(json.dumps(dataclasses.asdict(report)))


def _show_progress(what: str) -> None:
    typer.echo(what, err=True)
