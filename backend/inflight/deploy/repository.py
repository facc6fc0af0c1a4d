"""Model repositories: those shipped with this package, and new ones for other checkpoints."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

import inflight
from inflight import config
from inflight.checkpoint.locate import PACKAGE_PREFIX, Checkpoint, locate
from inflight.errors import ConfigError, did_you_mean

FOLDERS = ("model_repository", "ensembles")
Layout = Literal["native", "vllm", "tensorrtllm"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
"""Names and tensors of the models: ours, or those of another backend for Triton."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
# Models that are omitted if the checkpoint has no tokenizer, or no chat template.
_NEED_TOKENIZER = ("tokenizer", "chat_tokenizer", "detokenizer", "generate", "chat", "completion")
# Its ensembles need its responses to a stream.
_DECOUPLED = ("llm",)
_NEED_CHAT_TEMPLATE = ("chat_tokenizer", "chat")


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository written by `init`.

    Attributes:
        path: the folder to serve.
        models: names of the models in it, ensembles included.
        notes: what was omitted, and why.
    """

    path: Path
    models: tuple[str, ...]
    notes: tuple[str, ...]


def shipped() -> list[Path]:
    """The repositories shipped with this package: the models, and their ensembles.

    Raises:
        ConfigError: the installation is incomplete.
    """
    folders = [_packaged(name) for name in FOLDERS]
    for folder, model in zip(folders, ("llm", "chat"), strict=True):
        if not (folder / model).is_dir():
            raise ConfigError(f"{folder / model} does not exist; reinstall inflight-triton")
    return folders


def _packaged(name: str) -> Path:
    # Links in a checkout, files in a wheel.
    return (Path(inflight.__file__).resolve().parent / "_repository" / name).resolve()


def layout_folders(layout: str = "native", unary: bool = False) -> list[Path]:
    """The packaged folders with the models of a layout.

    Args:
        layout: one of LAYOUTS.
        unary: with the model `completion` of the native layout.

    Raises:
        ConfigError: there is no such layout.
    """
    if layout not in LAYOUTS:
        raise ConfigError(
            f"layout is {layout!r}; allowed: {', '.join(LAYOUTS)}{did_you_mean(layout, LAYOUTS)}"
        )
    if layout == "native":
        return [*shipped(), *([_packaged("layouts") / "unary"] if unary else [])]
    return [_packaged("layouts") / layout]


def shipped_model() -> str:
    """The model of the repository shipped with this package.

    Raises:
        ConfigError: the installation is incomplete.
    """
    path = shipped()[0] / "llm" / "1" / "engine.json"
    return str(config.load(path).model)


def init(
    model: str,
    directory: Path,
    *,
    name: str = "",
    settings: Mapping[str, Any] | None = None,
    layout: str = "native",
    unary: bool = False,
) -> Repository:
    """Write a repository that serves `model`.

    Args:
        model: see `locate`.
        directory: where to write; may contain other models, but none of the same names.
        name: prefix of the models' names, NAME_llm and so on, for several models in one server; the
            name itself where a layout has one model.
        settings: further keys of engine.json.
        layout: one of LAYOUTS.
        unary: with models that send one response per request: the further model `completion` in
            the native layout, all models in others.

    Raises:
        ConfigError: invalid model or setting, or a model exists already. Nothing is written then.
    """
    if name and not _NAME.fullmatch(name):
        raise ConfigError(
            f"name {name!r} is not allowed; letters, digits, '_', '-' and '.', 64 at most"
        )
    from inflight.models.registry import read_spec  # 0.15 s, and whoever serves does not need it

    checkpoint = locate(model)
    where = model if model.startswith(PACKAGE_PREFIX) else _path_of(model, checkpoint)
    engine = {"model": where, "device": "auto", **(settings or {})}
    checked = config.parse(engine, "settings")
    read_spec(checkpoint).max_model_len(checked)
    folders = layout_folders(layout, unary)
    found = [one for folder in folders for one in sorted(folder.iterdir()) if one.is_dir()]
    left_out, notes = _left_out(checkpoint, layout)
    sources = {source.name: source for source in found if source.name not in left_out}
    names = {one: name if len(found) == 1 else f"{name}_{one}" for one in sources}
    if not name:
        names = {one: one for one in sources}
    for target in names.values():
        if (directory / target).exists():
            raise ConfigError(f"{directory / target} exists; choose another folder or a --name")
    try:
        _write(directory, sources, names, engine, unary=unary)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or directory}: cannot be written ({error.strerror})"
        ) from None
    return Repository(directory, tuple(sorted(names.values())), notes)


def _path_of(model: str, checkpoint: Checkpoint) -> str:
    path = Path(model).expanduser()
    if path.exists():
        return str(path.resolve())
    return str(checkpoint.path.absolute())  # in the hub's cache, whose links lose their suffix


def _left_out(checkpoint: Checkpoint, layout: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    from inflight.text.chat_format import builtin_templates
    from inflight.text.tokenizer import Tokenizer  # as above

    tokenizer = Tokenizer.load_if_present(checkpoint)
    if layout != "native":
        if tokenizer is None:
            raise ConfigError(
                f"{checkpoint.path} has no tokenizer, which layout {layout} needs; allowed: native"
            )
        return (), ()
    if tokenizer is None:
        return _NEED_TOKENIZER, (f"{checkpoint.path} has no tokenizer: served with token ids only",)
    if tokenizer.chat_template is None:
        return _NEED_CHAT_TEMPLATE, (
            f"{checkpoint.path} has no chat template: chat is not available",
        )
    built_in = builtin_templates.name_of(tokenizer.chat_template)
    if built_in is not None:
        return (), (
            f"{checkpoint.path} has no chat template: chats have the form of {built_in}, for which "
            "a base model was not trained",
        )
    return (), ()


def _write(
    directory: Path,
    sources: Mapping[str, Path],
    names: Mapping[str, str],
    engine: Any,
    *,
    unary: bool,
) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    # Whole folders appear by rename: a tritonserver that polls never sees half a model.
    with tempfile.TemporaryDirectory(prefix=".new-", dir=directory) as scratch:
        for source, path in sources.items():
            copy = Path(scratch, names[source])
            shutil.copytree(path, copy, ignore=shutil.ignore_patterns("__pycache__"))
            text = (path / "config.pbtxt").read_text()
            if unary and source not in _DECOUPLED:
                text = text.replace("decoupled: true", "decoupled: false")
            (copy / "config.pbtxt").write_text(rename_models(text, names))
            if (copy / "1" / "engine.json").exists():
                encoded = msgspec.json.format(msgspec.json.encode(engine))
                (copy / "1" / "engine.json").write_bytes(encoded + b"\n")
        for target in names.values():
            Path(scratch, target).rename(directory / target)


def rename_models(text: str, names: Mapping[str, str]) -> str:
    """A config.pbtxt with renamed references to models: the steps of an ensemble, and the `llm` of
    a tokenizer or detokenizer."""

    def renamed(match: re.Match[str]) -> str:
        return f'{match[1]}"{names.get(match[2], match[2])}"'

    text = re.sub(r'(\bmodel_name:\s*)"([^"]+)"', renamed, text)
    return re.sub(r'(key:\s*"llm"\s*value:?\s*{\s*string_value:\s*)"([^"]+)"', renamed, text)
