"""`inflight bench serve`: loads a running server and reports what its clients see."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from inflight.cli.bench.serving.page import document
from inflight.cli.bench.serving.plan import Plan, plan, target
from inflight.cli.bench.serving.results import comparison, environment, report
from inflight.cli.bench.serving.results.records import GIVEN_UP
from inflight.cli.bench.serving.results.report import Level, Report
from inflight.cli.bench.serving.runner import Runner
from inflight.cli.bench.serving.show import Show
from inflight.cli.bench.serving.targets.target import CONTEXT, Target
from inflight.cli.options import LoadOptions, ReportOptions, TargetOptions
from inflight.errors import ConfigError

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def run(to: TargetOptions, load: LoadOptions, reports: ReportOptions) -> int:
    """Run what the options ask for, and report it.

    Returns:
        Exit status: 130 after Ctrl-C, otherwise see `exit_status`.

    Raises:
        ConfigError: an option is not valid, or a file cannot be written.
        ClientError: the server refuses prompts, or does not respond.
    """
    chosen = plan(load)
    for path in (reports.json_, reports.html):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{path}: its folder does not exist; create it first")
    show = Show()
    began = environment.date()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        server, levels, is_interrupted = runner.run(_measure(to, chosen, show))
    if levels:
        found = _report(began, server, chosen, levels)
        show.report(found)
        _write(found, reports, show)
    if is_interrupted:
        return EXIT_INTERRUPTED
    return exit_status(levels)


def exit_status(levels: Sequence[Level]) -> int:
    """1 if no request of a level completed, unless the load was too high for the SLO: that is a
    result."""
    failed = [one for one in levels if not one.num_completed and GIVEN_UP not in one.errors]
    return EXIT_FAILED if failed else 0


def compare(first: Path, second: Path, reports: ReportOptions) -> None:
    """Show the differences between two runs.

    Raises:
        ConfigError: a file is not a report, or the runs have no level in common.
    """
    if reports.json_ is not None:
        raise ConfigError("--json: a comparison has no JSON; give --html, or neither")
    before, after = report.read(first), report.read(second)
    differences = comparison.compare(before, after)
    show = Show()
    show.comparison(differences)
    if reports.html is not None:
        report.write_text(reports.html, document.of_comparison(before, after, differences))
        show.note(f"wrote {reports.html}")


async def _measure(
    options: TargetOptions, chosen: Plan, show: Show
) -> tuple[dict[str, str], list[Level], bool]:
    """What the server is, the levels that were measured, and whether the user stopped the run."""
    to: Target = target(options)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        show.note("stopping: Ctrl-C again stops at once, without results")
        loop.remove_signal_handler(signal.SIGINT)
        stop.set()

    try:
        server = await to.describe()
        if chosen.max_model_len is None and CONTEXT in server:
            chosen = dataclasses.replace(chosen, max_model_len=int(server[CONTEXT]))
        loop.add_signal_handler(signal.SIGINT, interrupt)
        runner = Runner(to, chosen, show, stop)
        await runner.run()
        return server, runner.levels, stop.is_set()
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        await to.aclose()


def _report(began: str, server: dict[str, str], chosen: Plan, levels: list[Level]) -> Report:
    return Report(
        date=began,
        command=environment.command(sys.argv[1:]),
        commit=environment.commit(),
        machine=environment.machine(),
        versions=environment.versions(),
        server=server,
        workload=chosen.workload(),
        slo=str(chosen.slo or ""),
        levels=levels,
    )


def _write(found: Report, reports: ReportOptions, show: Show) -> None:
    if reports.json_ is not None:
        report.write(found, reports.json_)
        show.note(f"wrote {reports.json_}")
    if reports.html is not None:
        report.write_text(reports.html, document.of_run(found))
        show.note(f"wrote {reports.html}")
