"""The documented table of types is that of the sources."""

from __future__ import annotations

import re
from pathlib import Path

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from inflight.models.quantization.gguf.kinds import KINDS
from inflight.models.quantization.grouped_memory import grouped_bits

PAGE = Path(__file__).parents[5] / "docs/reference/checkpoints.md"


def test_the_page_has_every_type() -> None:
    rows = re.findall(
        r"^\| ([\w, ]+) \| ([\d.]+) \| (\d) \| (\d+)(, with minimum)? \| ([\d.]+) \|$",
        PAGE.read_text(),
        re.MULTILINE,
    )
    found = {name: row for names, *row in rows for name in names.split(", ")}
    assert found.keys() == KINDS.keys()
    for name, (in_file, bits, group, minimum, in_memory) in found.items():
        kind = KINDS[name]
        assert (int(bits), int(group)) == (kind.bits, kind.group)
        assert bool(minimum) == kind.has_minimums
        assert float(in_memory) == grouped_bits(kind.bits, kind.group, kind.has_minimums)
        length, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
        assert float(in_file) == 8 * size / length


def test_a_code_has_a_level_and_a_place_for_zero() -> None:
    for kind in KINDS.values():
        assert kind.levels is None or len(kind.levels) == 1 << kind.bits
        assert kind.zero < 1 << kind.bits
        assert not (kind.zero and (kind.levels or kind.has_minimums))
