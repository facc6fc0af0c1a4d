"""What our pictures share: colours and escaping. They suit light and dark pages."""

from __future__ import annotations

from xml.sax.saxutils import escape

# A colour-blind-safe palette (Okabe and Ito, 2008), visible on white and on black.
BLUE = "#0072b2"
ORANGE = "#e69f00"
GREEN = "#009e73"
PURPLE = "#cc79a7"
SKY = "#56b4e9"
RED = "#d55e00"
YELLOW = "#f0e442"
GREY = "#8a8a8a"
PALETTE = (BLUE, ORANGE, GREEN, PURPLE, SKY, RED, GREY)


def attribute(text: str) -> str:
    """Escaped, for a value in double quotes."""
    return escape(text, {'"': "&quot;"})
