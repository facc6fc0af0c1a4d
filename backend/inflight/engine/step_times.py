"""How long a step may take, from earlier steps, to distinguish a long prefill from a hang."""

from __future__ import annotations

# Nothing is known of the first step of a size: it may allocate, autotune or compile.
UNKNOWN_S = 120.0
# Steps of as many tokens differ: by the context that they attend to, and by the machine's load.
MARGIN = 3.0


class StepTimes:
    """The slowest step of each size, where sizes are powers of two of tokens."""

    def __init__(self) -> None:
        self._slowest: dict[int, float] = {}

    def record(self, num_tokens: int, seconds: float) -> None:
        size = num_tokens.bit_length()
        self._slowest[size] = max(self._slowest.get(size, 0.0), seconds)

    def bound_s(self, num_tokens: int) -> float:
        """Seconds that a step of so many tokens should stay within."""
        size = num_tokens.bit_length()
        # The time grows with the size, so a larger step bounds this one, and a smaller one does if
        # each token takes as long as there.
        larger = [seconds for known, seconds in self._slowest.items() if known >= size]
        if larger:
            return MARGIN * min(larger)
        smaller = [seconds * 2.0 ** (size - known) for known, seconds in self._slowest.items()]
        return MARGIN * min(smaller) if smaller else UNKNOWN_S
