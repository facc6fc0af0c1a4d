"""Triton's version policies: which versions of a model are served."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from inflight.deploy.model_group import has_version_policy, parse_config
from inflight.errors import ConfigError


@dataclass(frozen=True, slots=True)
class VersionPolicy:
    """`version_policy` of a config.pbtxt.

    Attributes:
        latest: the number of highest versions; 0 for all.
        specific: these versions, whatever `latest` is; empty for none in particular.
    """

    latest: int = 1
    specific: tuple[int, ...] = ()

    @property
    def is_side_by_side(self) -> bool:
        """Whether it is another policy than Triton's default: the highest version alone."""
        return self != DEFAULT

    def select(self, available: Collection[int]) -> list[int]:
        """The versions that are served, in ascending order.

        Raises:
            ConfigError: a specific version does not exist.
        """
        if not self.specific:
            return sorted(available)[-self.latest :]
        missing = sorted(set(self.specific) - set(available))
        if missing:
            raise ConfigError(
                f"version_policy: version {missing[0]} does not exist; allowed: "
                f"{', '.join(map(str, sorted(available))) or 'none'}"
            )
        return sorted(set(self.specific))


DEFAULT = VersionPolicy()


def read_policy(folder: Path) -> VersionPolicy:
    """The policy of a model.

    Raises:
        ConfigError: its config.pbtxt is not valid.
    """
    if not has_version_policy(folder):
        return DEFAULT
    policy = parse_config(folder).version_policy
    choice = policy.WhichOneof("policy_choice")
    if choice == "all":
        return VersionPolicy(latest=0)
    if choice == "specific":
        versions = tuple(policy.specific.versions)
        if not versions:
            raise ConfigError(
                f"{folder.name}/config.pbtxt: version_policy: specific has no versions; allowed: "
                "one or more"
            )
        return VersionPolicy(specific=versions)
    # As in Triton, 0 is 1.
    return VersionPolicy(latest=max(1, policy.latest.num_versions))
