"""The documented table of types is that of the sources."""

from __future__ import annotations

import re
from pathlib import Path

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from inflight.models.quantization.gguf.kinds import KINDS, UNIT_COLUMNS
from inflight.models.quantization.gguf.sizes import form_of
from inflight.models.quantization.grouped_memory import host_bits, record_bits

PAGE = Path(__file__).parents[5] / "docs/reference/checkpoints.md"


def test_the_page_has_every_type() -> None:
    rows = re.findall(
        r"^\| ([\w, ]+) \| ([\d.]+) \| (\d) \| (\d+)(, with minimum)? \| ([\d.]+) \| ([\d.]+) \|$",
        PAGE.read_text(),
        re.MULTILINE,
    )
    found = {name: row for names, *row in rows for name in names.split(", ")}
    assert found.keys() == KINDS.keys()
    for name, (in_file, bits, group, minimum, on_host, on_gpu) in found.items():
        kind = KINDS[name]
        assert (int(bits), int(group)) == (kind.bits, kind.group)
        assert bool(minimum) == kind.has_minimums
        form = form_of(kind, width=4096)
        assert (float(on_host), float(on_gpu)) == (host_bits(form), record_bits(form))
        length, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
        assert float(in_file) == 8 * size / length


def test_a_code_has_a_level_and_a_place_for_zero() -> None:
    for kind in KINDS.values():
        assert kind.levels is None or len(kind.levels) == 1 << kind.bits
        assert kind.zero < 1 << kind.bits
        assert not (kind.zero and (kind.levels or kind.has_minimums))


def test_types_of_superblocks_have_units() -> None:
    in_units = {name for name, kind in KINDS.items() if kind.units is not None}
    assert in_units == {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"}
    for name in in_units:
        kind = KINDS[name]
        assert GGML_QUANT_SIZES[GGMLQuantizationType[name]][0] == UNIT_COLUMNS
        assert kind.units is not None and (kind.units[1] is not None) == kind.has_minimums
