"""Downloads models from the Hugging Face hub, or from the mirror that HF_ENDPOINT names.

By the library huggingface_hub, which `tokenizers` requires: it resumes lost connections, and keeps
files that are complete.
"""

from __future__ import annotations

import contextlib
import fnmatch
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from inflight.checkpoint.hub_cache import split_name
from inflight.errors import CapacityError, ConfigError, InflightError

# Beside the weights: settings, tokenizer, chat template, digests, terms of use.
_SMALL = ("*.json", "*.jinja", "tokenizer.model", "SHA256SUMS", "LICENSE*", "NOTICE*")
_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_MAX_LISTED = 12


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository.

    Attributes:
        name: its path in the repository.
        num_bytes: its size; 0 if the hub does not know it.
        is_present: whether it was downloaded before.
    """

    name: str
    num_bytes: int
    is_present: bool = False


def list_files(model: str, folder: Path | None) -> list[HubFile]:
    """The files of a model, by name.

    Args:
        model: ORGANISATION/NAME or ORGANISATION/NAME@REVISION.
        folder: where it is to be downloaded; None for the cache.

    Raises:
        ConfigError: the name is not valid, or the hub has no such model or revision, or wants a
            token.
        CapacityError: the hub cannot be reached, or does not answer as it should.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars

    repository, revision = _split(model)
    disable_progress_bars()
    with _errors(model):
        found = snapshot_download(repository, revision=revision, local_dir=folder, dry_run=True)
    if sys.stderr.isatty():
        enable_progress_bars()
    files = [HubFile(one.filename, one.file_size or 0, not one.will_download) for one in found]
    return sorted(files, key=lambda file: file.name)  # the library asks for them side by side


def needed_files(files: Sequence[HubFile], gguf: str = "") -> list[HubFile]:
    """The files that serve a model: safetensors with settings and tokenizer, or one GGUF file.

    Args:
        files: of the repository.
        gguf: pattern of the GGUF file's name, such as `*Q4_K_M*`, or a part of the name.

    Raises:
        ConfigError: there are none that are supported, or several GGUF files match.
    """
    top = [one for one in files if "/" not in one.name]
    weights = [one for one in top if fnmatch.fnmatch(one.name, "model*.safetensors")]
    weights = weights or [one for one in top if one.name.endswith(".safetensors")]
    if weights and not gguf:
        return [*weights, *(one for one in top if is_small(one))]
    ggufs = [one for one in files if one.name.endswith(".gguf")]
    if not ggufs:
        raise ConfigError(
            "the repository has no GGUF file; omit --gguf"
            if weights
            else "the repository has neither safetensors nor GGUF files; other weight formats are "
            "not supported"
        )
    pattern = gguf if any(sign in gguf for sign in "*?[") else f"*{gguf}*"
    matching = [one for one in ggufs if fnmatch.fnmatch(one.name.lower(), pattern.lower())]
    if len(matching) != 1:
        what = f"{len(matching)} GGUF files match" if gguf else f"{len(ggufs)} GGUF files"
        raise ConfigError(f"{what}; choose one with --gguf: {_listed(matching or ggufs)}")
    if _SPLIT.search(matching[0].name):
        raise ConfigError(f"{matching[0].name}: split GGUF files are not supported; choose another")
    return matching


def is_small(file: HubFile) -> bool:
    """Whether it is no weight."""
    return any(fnmatch.fnmatch(file.name, pattern) for pattern in _SMALL)


def download(model: str, files: Sequence[HubFile], folder: Path | None) -> Path:
    """Download some files of a model; those that are present stay. Shows progress on a terminal.

    Args:
        model, folder: as for `list_files`.
        files: which.

    Returns:
        The folder with the files.

    Raises:
        ConfigError, CapacityError: see `list_files`; or the disk is full.
    """
    from huggingface_hub import snapshot_download

    repository, revision = _split(model)
    names = [re.sub(r"([*?[])", r"[\1]", one.name) for one in files]
    with _errors(model):
        found = snapshot_download(
            repository, revision=revision, local_dir=folder, allow_patterns=names
        )
    return Path(found)


def _split(model: str) -> tuple[str, str]:
    found = split_name(model)
    if found is None:
        raise ConfigError(
            f"{model!r} is not a model of the hub; allowed: ORGANISATION/NAME, or "
            "ORGANISATION/NAME@REVISION"
        )
    return found


@contextlib.contextmanager
def _errors(model: str) -> Iterator[None]:
    """Turn the library's errors into those of this package, each one line."""
    try:
        yield
    except OSError as error:
        raise _translated(model, error) from None


def _translated(model: str, error: BaseException | None) -> InflightError:
    from huggingface_hub import errors

    match error:
        case errors.DryRunError() if isinstance(error.__cause__, errors.HfHubHTTPError):
            return _translated(model, error.__cause__)
        case errors.DryRunError() | errors.LocalEntryNotFoundError():
            return CapacityError(f"{model}: the hub cannot be reached; check HF_ENDPOINT")
        case errors.GatedRepoError():
            return ConfigError(
                f"{model}: access is restricted; accept its terms on the hub, and set HF_TOKEN"
            )
        case errors.RepositoryNotFoundError():
            return ConfigError(f"{model}: the hub has no such model, or it needs HF_TOKEN")
        case errors.RevisionNotFoundError():
            return ConfigError(f"{model}: the model has no such revision")
        case errors.HfHubHTTPError():
            return CapacityError(f"{model}: the hub answers {error.response.status_code}")
        case OSError():
            return CapacityError(f"{model}: {error.strerror or error}")
    return CapacityError(f"{model}: {error}")


def _listed(files: Sequence[HubFile]) -> str:
    names = [f"{one.name} ({one.num_bytes / 1e9:.1f} GB)" for one in files[:_MAX_LISTED]]
    more = len(files) - len(names)
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")
