"""The models with an engine that a server can load, each version of its own where a policy asks for
several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from inflight.core.model_version import SEPARATOR, split_version, versioned
from inflight.deploy.model_group import (
    ALL_MODELS,
    ModelGroup,
    find_groups,
    other_models,
    parse_config,
)
from inflight.deploy.repository import rename_models
from inflight.deploy.version_policy import read_policy
from inflight.errors import ConfigError


class Catalog:
    """The groups of model repositories. A model whose config.pbtxt has another policy than the
    highest version alone has one group for each version, NAME@VERSION, with models of its own in
    Triton; they are written to `folder`. Which models these are is decided once.

    Args:
        repositories: model repositories.
        folder: for the models of versions; created if there are any.

    Attributes:
        repositories: those that Triton serves.
        versioned: names of the models in Triton that have several versions, the ensembles included.

    Raises:
        ConfigError: a config.pbtxt is not valid.
    """

    def __init__(self, repositories: Sequence[Path], folder: Path) -> None:
        self._sources = [path.resolve() for path in repositories]
        self._folder = folder.resolve()
        sources = find_groups(self._sources)
        reserved = [name for name in sources if SEPARATOR in name]
        if reserved:
            raise ConfigError(
                f"model {reserved[0]}: {SEPARATOR!r} is not allowed in names; rename its folder"
            )
        self._names = frozenset(
            name for name, group in sources.items() if read_policy(group.folder).is_side_by_side
        )
        self.repositories = [*self._sources, self._folder] if self._names else self._sources
        members = (member for name in self._names for member in sources[name].names)
        self.versioned = frozenset(members)
        for name in sorted(self._names):
            for version in _versions(sources[name]):
                self._write(sources[name], version)

    @property
    def others(self) -> list[str]:
        """Names of the models that belong to no group."""
        return other_models(self._sources)

    def groups(self) -> dict[str, ModelGroup]:
        """All groups by name, whatever the policies."""
        found = {}
        for name, source in find_groups(self._sources).items():
            if name not in self._names:
                found[name] = source
                continue
            for version in _versions(source):
                group = self._version(source, version)
                found[group.name] = group
        return found

    def find(self, name: str) -> list[ModelGroup]:
        """The groups of a model, or of its prefix as for `inflight repo init --name`: one; or those
        of the versions that its policy selects, in ascending order. With @VERSION, that version
        alone, whatever the policy. Those of versions are written anew.

        Raises:
            ConfigError: there is none.
        """
        sources = find_groups(self._sources)
        wanted, version = split_version(name)
        key = next((one for one in (wanted, f"{wanted}_llm") if one in sources), None)
        if key is None:
            raise ConfigError(
                f"the repositories have no model {wanted} with an engine; allowed: "
                f"{', '.join(sorted(sources)) or 'none'}"
            )
        source = sources[key]
        if key not in self._names:
            if version is not None:
                raise ConfigError(
                    f"model {key} has one version at a time, as its config.pbtxt had no "
                    f"version_policy for several when the server started; allowed: {key}"
                )
            return [source]
        available = _versions(source)
        if not available:
            raise ConfigError(
                f"model {key} has no version; allowed: folders {key}/1, {key}/2, ... with an "
                "engine.json"
            )
        if version is None:
            try:
                selected = read_policy(source.folder).select(available)
            except ConfigError as error:
                raise ConfigError(f"model {key}: {error}") from None
        elif version in available:
            selected = [version]
        else:
            raise ConfigError(
                f"model {key} has no version {version}; allowed: {', '.join(map(str, available))}"
            )
        for one in selected:
            self._write(source, one)
        return [self._version(source, one) for one in selected]

    def select(self, names: Sequence[str]) -> dict[str, ModelGroup]:
        """The groups of these names, or of `ALL_MODELS`, by name. Raises ConfigError as `find`."""
        if tuple(names) == ALL_MODELS:
            names = list(find_groups(self._sources))
        return {group.name: group for name in names for group in self.find(name)}

    def _version(self, source: ModelGroup, version: int) -> ModelGroup:
        members = [self._folder / versioned(member.name, version) for member in source.members]
        return ModelGroup(self._folder / versioned(source.name, version), tuple(members))

    def _write(self, source: ModelGroup, version: int) -> None:
        """The models of a version, wired to each other; their version folders are links."""
        names = {name: versioned(name, version) for name in source.names}
        for member in source.members:
            target = self._folder / names[member.name]
            target.mkdir(mode=0o700, parents=True, exist_ok=True)
            link = target / str(version)
            if (member / str(version)).is_dir():
                if not link.is_symlink():
                    link.symlink_to((member / str(version)).resolve())
            else:
                link.mkdir(exist_ok=True)
            (target / "config.pbtxt").write_text(_config_text(member, names))


def _versions(group: ModelGroup) -> list[int]:
    """Of the folders with an engine.json, in ascending order."""
    folders = (path.parent.name for path in group.folder.glob("*/engine.json"))
    return sorted(int(name) for name in folders if name.isdecimal())


def _config_text(member: Path, names: dict[str, str]) -> str:
    """A config.pbtxt for the only version of a model, whose references are renamed."""
    from google.protobuf import text_format

    config = parse_config(member)
    config.ClearField("version_policy")
    config.ClearField("name")
    return rename_models(str(text_format.MessageToString(config)), names)
