"""What to compare with: another engine's figures, what is wanted, and what the machine can do.

They hold for one model on one kind of machine, so they come from a file and not from here:

    {"peer": "vLLM 0.22.1, measured earlier on the same kind of machine",
     "rows": {"bs64": {"none": {"peer": 10792, "must": 11500, "goal": 13000, "limit": 13900}}}}

by row and by quantisation; a figure that is not known is left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from inflight.errors import ConfigError

Metric = Literal["out_tok_s", "prompt_tok_s", "ready_s"]


class Bar(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """In the row's metric: tokens per second, or seconds for `start`.

    Attributes:
        peer: what the other engine reached.
        must: what is the least.
        goal: what is aimed at.
        limit: what the memory and the arithmetic units allow, one after the other.
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
        ConfigError: it cannot be read or is of another form.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Bars)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
