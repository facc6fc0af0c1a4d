"""What matrices in the types of GGUF files become: codes of 4 to 8 bits with scales of groups.

It follows from a file's header alone. Importing this module imports neither torch nor gguf.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

Levels: TypeAlias = tuple[float, ...]

UNIT_COLUMNS = 256
"""Of a block that has units."""


@dataclass(frozen=True, slots=True)
class BlockKind:
    """The form of a `GroupedMatrix` whose values are exactly those of a type.

    Attributes:
        bits: of a code.
        group: columns with a scale in common.
        has_minimums: whether a group has a minimum.
        zero: the code that stands for 0.
        levels: the values of 16 codes; None if a code is its own value.
        units: where a block has the number that its scales are multiples of, and that of its
            minimums, if any, in float16: at which bytes. None if each scale is a number of its own.
    """

    bits: int
    group: int
    has_minimums: bool = False
    zero: int = 0
    levels: Levels | None = None
    units: tuple[int, int | None] | None = None


def _signed(*magnitudes: float) -> Levels:
    """Of up to 8 magnitudes, and with the code's bit 3 their negatives."""
    padded = (*magnitudes, *[0.0] * (8 - len(magnitudes)))
    return (*padded, *(-value for value in padded))


# Sources: ggml-common.h and ggml-quants.c of ggml, and quants.py of the `gguf` package.
_NONLINEAR = tuple(
    map(float, (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))
)
_DOUBLED_E2M1 = _signed(0, 1, 2, 3, 4, 6, 8, 12)
_IQ2 = _signed(8, 25, 43)
_IQ3_XXS = _signed(4, 12, 20, 28, 36, 44, 52, 62)
_IQ3_S = _signed(1, 3, 5, 7, 9, 11, 13, 15)
# Of -1, 0 and 1, to which an eighth is added, or with the code's bit 3 subtracted.
_IQ1 = (-0.875, 0.125, 1.125, *[0.0] * 5, -1.125, -0.125, 0.875, *[0.0] * 5)

KINDS: dict[str, BlockKind] = {
    "Q4_0": BlockKind(4, 32, zero=8),
    "Q4_1": BlockKind(4, 32, has_minimums=True),
    "Q5_0": BlockKind(5, 32, zero=16),
    "Q5_1": BlockKind(5, 32, has_minimums=True),
    "Q8_0": BlockKind(8, 32, zero=128),
    "Q2_K": BlockKind(4, 16, has_minimums=True, units=(80, 82)),
    "Q3_K": BlockKind(4, 16, zero=4, units=(108, None)),
    "Q4_K": BlockKind(4, 32, has_minimums=True, units=(0, 2)),
    "Q5_K": BlockKind(5, 32, has_minimums=True, units=(0, 2)),
    "Q6_K": BlockKind(6, 16, zero=32, units=(208, None)),
    "TQ1_0": BlockKind(4, 256, zero=1),
    "TQ2_0": BlockKind(4, 256, zero=1),
    "IQ1_S": BlockKind(4, 32, levels=_IQ1),
    "IQ1_M": BlockKind(4, 16, levels=_IQ1),
    "IQ2_XXS": BlockKind(4, 32, levels=_IQ2),
    "IQ2_XS": BlockKind(4, 16, levels=_IQ2),
    "IQ2_S": BlockKind(4, 16, levels=_IQ2),
    "IQ3_XXS": BlockKind(4, 32, levels=_IQ3_XXS),
    "IQ3_S": BlockKind(4, 32, levels=_IQ3_S),
    "IQ4_NL": BlockKind(4, 32, levels=_NONLINEAR),
    "IQ4_XS": BlockKind(4, 32, levels=_NONLINEAR),
    "MXFP4": BlockKind(4, 32, levels=_DOUBLED_E2M1),
    "NVFP4": BlockKind(4, 16, levels=_DOUBLED_E2M1),
}
"""By the name of the type. Types of 16 bits and more are not in it, nor those of vectors."""
