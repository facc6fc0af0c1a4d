"""`inflight pull`: downloads a model from the Hugging Face hub."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import typer

from inflight.checkpoint import hub_download, shards
from inflight.checkpoint.hub_download import HubFile
from inflight.checkpoint.locate import Checkpoint, locate
from inflight.errors import CapacityError, ConfigError
from inflight.models.registry import read_spec


def run(model: str, folder: Path | None, gguf: str) -> None:
    """Download a model, and print the command that serves it.

    Args:
        model: ORGANISATION/NAME or ORGANISATION/NAME@REVISION.
        folder: where; None for the hub's cache, where `serve` finds it by its name.
        gguf: which GGUF file; see `needed_files`.

    Raises:
        ConfigError: the hub does not have it, or it is not supported.
        CapacityError: the hub cannot be reached and the model was not downloaded before, or the
            disk is full.
    """
    try:
        files = hub_download.needed_files(hub_download.list_files(model, folder), gguf)
    except CapacityError as error:
        if folder is None and _is_complete(model):
            typer.echo(f"warning: {error}; what was downloaded before is complete", err=True)
            return
        raise
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if model in text else f"{model}: {text}") from None
    small = [one for one in files if hub_download.is_small(one)]
    if small:
        found = hub_download.download(model, small, folder)
        read_spec(Checkpoint(found, "huggingface"))  # refused before the weights are downloaded
    missing = sum(one.num_bytes for one in files if not one.is_present)
    check_space(folder or Path.home(), missing)
    found = hub_download.download(model, files, folder)
    typer.echo(f"pulled {model}: {_described(files)} in {found}")
    typer.echo(f"next: inflight serve {folder or model}", err=True)


def check_space(folder: Path, num_bytes: int) -> None:
    """Raises CapacityError: the disk of a folder, which may not exist yet, has less left."""
    while not folder.exists():
        folder = folder.parent
    left = shutil.disk_usage(folder).free
    if left < num_bytes:
        raise CapacityError(
            f"{num_bytes / 1e9:.1f} GB are to be downloaded, but {folder} has {left / 1e9:.1f} GB "
            "left; free some, or choose another disk with --dir or HF_HOME"
        )


def _is_complete(model: str) -> bool:
    """Whether the cache has a model with all its weights."""
    try:
        found = locate(model)
        if found.format == "huggingface":
            shards.check_files(found.path)
    except ConfigError:
        return False
    return True


def _described(files: Sequence[HubFile]) -> str:
    size = sum(one.num_bytes for one in files) / 1e6
    return f"{len(files)} file{'s' if len(files) != 1 else ''}, {size:,.1f} MB"
