"""How folders store matrices of codes with a scale for each group of columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["awq", "bitsandbytes", "gptq", "mxfp4", "nvfp4", "packed"]

ROW = 0
"""As the size of a group: all columns of a row."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What config.json says of one kind of quantised matrices.

    Attributes:
        kind: which tensors there are, and what they mean; there is a module for each.
        label: of the values, such as int4.
        bits: the possible ones of a code.
        groups: the possible numbers of columns with a scale in common, or ROW.
        symmetric: whether all groups have one zero, the middle of the codes.
        stored_less: what is to be added to stored zeros.
        has_order: whether columns of a group need not be neighbours.
    """

    kind: Kind
    label: str
    bits: frozenset[int]
    groups: frozenset[int]
    symmetric: bool = True
    stored_less: int = 0
    has_order: bool = False

    def group_sizes(self, width: int) -> list[int]:
        """The possible ones for a matrix with so many columns, which may not be a multiple."""
        return sorted({group if group != ROW else width for group in self.groups})
