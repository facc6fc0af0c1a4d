"""`inflight model show` and `inflight serve --dry-run`."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import typer

from inflight import config
from inflight.checkpoint.locate import locate
from inflight.config import EngineConfig
from inflight.deploy.catalog import Catalog
from inflight.deploy.checks.engine import check_engine
from inflight.deploy.model_group import ALL_MODELS
from inflight.errors import ConfigError
from inflight.ipc.engine_client import engine_config_path
from inflight.models.registry import read_spec


def show(model: str, settings: Mapping[str, Any], *, as_json: bool) -> None:
    """Print what is understood of a checkpoint.

    Args:
        model: as for `locate`.
        settings: of the engine, as in engine.json.
        as_json: print one JSON object.

    Raises:
        ConfigError: it cannot be loaded, with the reason.
    """
    checkpoint = locate(model)
    read_spec(checkpoint)  # what is not supported is refused before torch is imported
    engine = {"model": model, "device": "auto", **settings}
    found = _summarize(config.parse(engine, "settings"))
    if as_json:
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
        return
    from inflight.cli.inspection import lines
    from inflight.cli.inspection.memory_plan import shortage

    lines.write(found)
    missing = shortage([found.memory])
    if missing:
        typer.echo(f"warning: {missing}", err=True)


def dry_run(repositories: Sequence[Path], names: Sequence[str] | None) -> bool:
    """Print what is understood of each model that a server would load, and what keeps it from that.

    Args:
        repositories: model repositories.
        names: of the models to load; None for all of them.

    Returns:
        Whether all of them can be served.

    Raises:
        ConfigError: the repositories have no such models.
    """
    from inflight.cli.inspection import lines
    from inflight.cli.inspection.memory_plan import shortage

    with _model_folders(repositories, ALL_MODELS if names is None else names) as folders:
        refusals, plans = [], []
        for folder in folders:
            typer.echo(f"{folder.name}:")
            try:
                check_engine(folder)
                found = _summarize(config.load(engine_config_path(folder)))
            except ConfigError as error:
                text = str(error).removeprefix(f"model {folder.name}: ")
                refusals.append(f"model {folder.name}: {text}")
                typer.echo(f"cannot be served: {text}\n")
                continue
            lines.write(found)
            typer.echo()
            plans.append(found.memory)
    missing = shortage(plans)
    if missing:
        refusals.append(missing)
    for refusal in refusals:
        typer.echo(f"error: {refusal}", err=True)
    if not refusals:
        count = len(folders)
        typer.echo(f"{count} model{'s' if count != 1 else ''} can be served", err=True)
    return not refusals


def _summarize(found: EngineConfig) -> Any:
    from inflight.cli.inspection.summary import summarize  # imports torch, which takes seconds

    return summarize(found, locate(found.model))


@contextmanager
def _model_folders(repositories: Sequence[Path], names: Sequence[str]) -> Iterator[list[Path]]:
    """The folders of the models with an engine; those of versions exist within the block."""
    for path in repositories:
        if not path.is_dir():
            raise ConfigError(f"repository {path} is not a folder; create one with `repo init`")
    with tempfile.TemporaryDirectory(prefix="inflight-") as folder:
        groups = Catalog(repositories, Path(folder)).select(names)
        if not groups:
            shown = ", ".join(map(str, repositories))
            raise ConfigError(f"{shown}: no model has an engine.json; see `inflight repo init`")
        yield [group.folder for group in groups.values()]
