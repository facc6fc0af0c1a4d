"""Reference figures for `inflight bench engine`: another engine's, the minimum for a release, and
the limit of the machine.

They apply to one model on one kind of machine, so they are read from a file:

    {"peer": "vLLM 0.22.1, measured earlier on the same kind of machine",
     "rows": {"bs64": {"none": {"peer": 10792, "must": 11500, "goal": 13000, "limit": 13900}}}}

keyed by row, then by quantisation; unknown figures are omitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from inflight.cli.bench import show, tables
from inflight.errors import ConfigError

_FIGURES = ("peer", "must", "goal", "limit")


class Bar(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """In the row's metric: tokens per second, or seconds for `start`.

    Attributes:
        peer: figure of the other engine.
        must: minimum for a release.
        goal: target.
        limit: bound by memory bandwidth and arithmetic throughput, without overlap.
    """

    peer: float | None = None
    must: float | None = None
    goal: float | None = None
    limit: float | None = None


class Bars(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """See the module.

    Attributes:
        peer: name of the other engine, and when and where it was measured.
        rows: by row, then by quantisation.
    """

    peer: str = ""
    rows: dict[str, dict[str, Bar]] = {}

    def of(self, row: str, quant: str) -> Bar:
        return self.rows.get(row, {}).get(quant, Bar())


def load(path: Path) -> Bars:
    """
    Raises:
        ConfigError: the file cannot be read or is malformed.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Bars)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None


def compare(row: Mapping[str, Any], bars: Bars) -> dict[str, Any]:
    """A row of a report with its bars and, if there is a peer, the ratio to its figure."""
    bar = bars.of(row["row"], row["quant"])
    found = dict(row)
    for name in _FIGURES:
        wanted = getattr(bar, name)
        if wanted is not None:
            found[name] = wanted
    if bar.peer is not None:
        value = row[row["metric"]]
        # Above 1 means better than the peer, for times as well.
        ratio = bar.peer / value if row["metric"] == "ready_s" else value / bar.peer
        found["of_peer"] = round(ratio, 3)
    return found


def cells(row: Mapping[str, Any]) -> dict[str, str]:
    """A row of `compare` as table cells; unknown values are empty."""
    if "refused" in row:  # it has a metric, but no value of it
        return {**show.cells({**row, row["metric"]: 0}), "value": "refused"} | _roofline(row)
    found = show.cells(row) | _roofline(row)
    for name in _FIGURES:
        found[name] = tables.number(row[name]) if name in row else ""
    found["of peer"] = f"{row['of_peer']:.2f} x" if "of_peer" in row else ""
    found["of limit"] = f"{row[row['metric']] / row['limit']:.0%}" if "limit" in row else ""
    if "must" in row:
        found["verdict"] = verdict(row)
    return found


def _roofline(row: Mapping[str, Any]) -> dict[str, str]:
    if "roofline" not in row:
        return {}
    share = f"{row['of_roofline']:.0%}" if "of_roofline" in row else ""
    return {"roofline": tables.number(row["roofline"]), "of roofline": share}


def verdict(row: Mapping[str, Any]) -> str:
    """The higher of `goal` and `must` that a row with a `must` reaches, else `below`."""
    sign = -1 if row["metric"] == "ready_s" else 1
    value = sign * row[row["metric"]]
    if "goal" in row and value >= sign * row["goal"]:
        return "goal"
    return "must" if value >= sign * row["must"] else "below"
