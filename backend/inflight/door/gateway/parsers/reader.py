"""Text that arrives in parts, read by generators that yield when they need more."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")

Steps = Generator[None, None, T]
"""Reads on each `next`, yields when the available text does not suffice, and returns a T."""

MAX_SPACE = 64
"""White space before a marker that is withheld with it, in characters."""

_SPACE = re.compile(r"\s+")


class Reader:
    """The unread part of an output.

    Only what a marker may still begin with stays unread between two parts, so the buffer is short,
    and reading is linear in the text whatever the parts are. What has to be withheld for longer is
    recorded: `record` starts, and `recorded` returns all that was read since.

    Attributes:
        text: unread from position `at` on.
        at: position in `text`.
        ended: nothing follows `text`.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self._record: list[str] | None = None

    def append(self, text: str) -> None:
        self.text = self.text[self.at :] + text
        self.at = 0

    def record(self) -> None:
        """Start to record what is read."""
        self._record = []

    def recorded(self) -> str:
        """What was read since `record`; recording stops."""
        found = "".join(self._record or ())
        self._record = None
        return found

    def advance(self, end: int) -> str:
        """Read up to a position in `text`."""
        taken = self.text[self.at : end]
        self.at = end
        if self._record is not None:
            self._record.append(taken)
        return taken

    def more(self) -> Steps[bool]:
        """Wait for a character; False at the end of the output."""
        while self.at >= len(self.text):
            if self.ended:
                return False
            yield
        return True

    def peek(self) -> Steps[str]:
        """The next character, unread; "" at the end of the output."""
        return self.text[self.at] if (yield from self.more()) else ""

    def accept(self, literal: str) -> Steps[bool]:
        """Read a literal if it is next; decides at the first character that differs."""
        while True:
            if self.text.startswith(literal, self.at):
                self.advance(self.at + len(literal))
                return True
            if self.ended or not literal.startswith(self.text[self.at :]):
                return False
            yield

    def skip(self, pattern: re.Pattern[str] = _SPACE) -> Steps[None]:
        """Read characters that match; white space by default.

        Args:
            pattern: matches a run of characters, each by itself.
        """
        while (yield from self.more()):
            match = pattern.match(self.text, self.at)
            if match is None:
                return
            self.advance(match.end())

    def run(self, pattern: re.Pattern[str], max_len: int) -> Steps[str]:
        """Read and return characters that match, up to `max_len`."""
        found = ""
        while len(found) < max_len and (yield from self.more()):
            match = pattern.match(self.text, self.at, self.at + max_len - len(found))
            if match is None:
                break
            found += self.advance(match.end())
        return found

    def until(
        self, markers: Sequence[str], emit: Callable[[str], None], max_space: int = MAX_SPACE
    ) -> Steps[str]:
        """Read up to and including the first of some markers; emit what precedes it.

        Recording starts with the white space before the marker.

        Returns:
            The marker; "" at the end of the output.
        """
        marker = yield from self.before(markers, emit, max_space)
        if marker:
            self.record()
            self.advance(self.text.index(marker, self.at) + len(marker))
        return marker

    def before(
        self, markers: Sequence[str], emit: Callable[[str], None], max_space: int = 0
    ) -> Steps[str]:
        """Read up to the first of some markers; emit it.

        Withholds what may be the start of a marker, and leaves up to `max_space` characters of
        white space before it unread.

        Returns:
            The marker, which is unread; "" at the end of the output.
        """
        search = re.compile("|".join(map(re.escape, markers))).search
        first = re.compile("|".join(re.escape(marker[0]) for marker in markers))
        while True:
            match = search(self.text, self.at)
            start = match.start() if match else self._possible(markers, first)
            start = self._before_space(start, max_space)
            if match is None and self.ended:
                start = len(self.text)
            if start > self.at:
                emit(self.advance(start))
            if match is not None:
                return match[0]
            if self.ended:
                return ""
            yield

    def _possible(self, markers: Sequence[str], first: re.Pattern[str]) -> int:
        """Position of the longest end of the text that one of the markers starts with.

        Args:
            first: matches the first characters of the markers.
        """
        size = len(self.text)
        longest = max(map(len, markers)) - 1
        for match in first.finditer(self.text, max(self.at, size - longest)):
            end = self.text[match.start() :]
            if any(marker.startswith(end) for marker in markers):
                return match.start()
        return size

    def _before_space(self, position: int, max_space: int) -> int:
        low = max(self.at, position - max_space)
        while position > low and self.text[position - 1].isspace():
            position -= 1
        return position
