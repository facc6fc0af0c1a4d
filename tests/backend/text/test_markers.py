"""Markers are found in a text as the tokenizer finds them: the longest one."""

import random
import re

from inflight.text.markers import MarkerEscaper

# Prefixes of each other, regular expressions' characters, and as many as Gemma has.
MARKERS = ["<|a|>", "<|a|>b", "<|a", "[INST]", "[/INST]", "(?", "x", "xyz", "é\n", ".*"]
MANY = [f"<unused{number}>" for number in range(6000)]


def pieces_by_definition(text: str, markers: list[str]) -> list[str | int]:
    longest_first = sorted(markers, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text)
    return [markers.index(part) if i % 2 else part for i, part in enumerate(parts) if part]


def test_the_longest_marker_counts() -> None:
    escaper = MarkerEscaper({text: id_ for id_, text in enumerate(MARKERS)})
    assert escaper.split_markers("<|a|>b<|a|>c<|a xyxyz") == [1, 0, "c", 2, " ", 6, "y", 7]
    draw = random.Random(0)
    parts = [*MARKERS, *(text[:-1] for text in MARKERS), "<", "|", " ", "é"]
    for _ in range(300):
        text = "".join(draw.choices(parts, k=draw.randint(1, 9)))
        assert escaper.split_markers(text) == pieces_by_definition(text, MARKERS)
        escaped = escaper.escape(text)
        found = escaper.split_markers(escaped)
        assert "".join(map(str, found)) == text and not any(isinstance(p, int) for p in found)


def test_thousands_of_markers_are_found() -> None:
    escaper = MarkerEscaper({text: id_ for id_, text in enumerate(MANY)})
    assert escaper.split_markers("<unused5999>a<unused6000>") == [5999, "a<unused6000>"]
    assert escaper.split_markers("<unused1><unused10><unused") == [1, 10, "<unused"]


def test_without_markers_a_text_is_one_piece() -> None:
    assert MarkerEscaper({}).split_markers("<|a|>") == ["<|a|>"]
    assert MarkerEscaper({}).escape("<|a|>") == "<|a|>"
