"""What is kept of a request, and its latencies.

Several tokens may arrive in one response, under load or with speculative decoding. They arrive at
the same time, so:

- TTFT ends with the first response that has a token.
- A response with k tokens after a gap g counts as k intervals of g / k in ITL. The undivided gaps
  are a metric of their own, since they are the pauses that a reader sees.
- TPOT is the time from the first response to the last one, divided by the tokens after the first
  response. It equals the request's mean ITL.

Latencies of an open loop count from the time at which a request was due. Counted from the time at
which it was sent, they would lack the wait that a busy load generator adds, and that users feel
(coordinated omission; Tene, 2013).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

UNFINISHED = "Unfinished"
"""The error of a request that was in flight when the run was interrupted."""
GIVEN_UP = "GivenUp"
"""The error of a measured request that could no longer meet the SLO and was cancelled. Its
latencies are those until then; at least one of them is above its bound."""


@dataclass(slots=True)
class Record:
    """A request as it runs; times of `time.perf_counter()`.

    Attributes:
        sent: when it was sent.
        arrivals: (time, tokens) of each response with tokens.
        ended: when its stream ended or failed; 0 before.
        num_input_tokens: as the server reports.
        num_output_tokens: as the server reports for the whole output; 0 if it does not.
        error: kind of its failure; "" if there is none.
        due: when an open loop was to send it; None in a closed loop.
        give_up: when it has missed the SLO whatever happens, so that nobody waits for it.
        is_measured: it is due in the window of its level, if that has one.
    """

    sent: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    ended: float = 0.0
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    error: str = ""
    due: float | None = None
    give_up: float = math.inf
    is_measured: bool = True

    @property
    def began(self) -> float:
        """When its latencies begin."""
        return self.sent if self.due is None else self.due

    def settled(self) -> list[tuple[float, float]]:
        """(time, tokens) of each response. If the server reports only the total, it is spread
        evenly over the responses."""
        total = sum(count for _, count in self.arrivals)
        if not self.num_output_tokens or self.num_output_tokens == total or not total:
            return [(at, float(count)) for at, count in self.arrivals]
        each = self.num_output_tokens / len(self.arrivals)
        return [(at, each) for at, _ in self.arrivals]


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Latencies of one request, in milliseconds.

    Attributes:
        sent_s: seconds from the start of the level until it was sent; in an open loop, until it was
            due. Its latencies count from there.
        input_tokens: of the prompt.
        output_tokens: received.
        ttft_ms: time to first token; None without a token, unless it was given up.
        tpot_ms: time per output token after the first response; None if there is only one response.
        gap_ms: the longest gap between two responses; None likewise.
        e2e_ms: until the end of the stream.
        error: kind of the failure; "" if there is none.
    """

    sent_s: float
    input_tokens: int
    output_tokens: int
    ttft_ms: float | None
    tpot_ms: float | None
    gap_ms: float | None
    e2e_ms: float
    error: str = ""


def times_of(record: Record, started: float) -> RequestTimes:
    """
    Args:
        started: `time.perf_counter()` at the start of the level.
    """
    arrivals = record.settled()
    gaps = gaps_of(arrivals)
    rest = sum(count for _, count in arrivals[1:])
    first = arrivals[0][0] if arrivals else None
    last = arrivals[-1][0] if arrivals else None
    if record.error == GIVEN_UP:
        first, last = record.ended if first is None else first, record.ended
        rest = rest or float(bool(arrivals))  # the next token is what it waited for
    return RequestTimes(
        sent_s=round(record.began - started, 6),
        input_tokens=record.num_input_tokens,
        output_tokens=round(sum(count for _, count in arrivals)),
        ttft_ms=None if first is None else _ms(first - record.began),
        tpot_ms=_ms((last - first) / rest) if rest and first is not None and last else None,
        gap_ms=_ms(max(gap for gap, _ in gaps)) if gaps else None,
        e2e_ms=_ms(record.ended - record.began),
        error=record.error,
    )


def gaps_of(arrivals: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """(seconds since the preceding response, tokens) of each response but the first."""
    return [(after[0] - before[0], after[1]) for before, after in itertools.pairwise(arrivals)]


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 4)
