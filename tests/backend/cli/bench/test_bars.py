"""What to compare with."""

from __future__ import annotations

from pathlib import Path

import pytest

from inflight.cli.bench import bars
from inflight.cli.bench.bars import Bar
from inflight.cli.bench.rows import ROWS, START
from inflight.errors import ConfigError

SHIPPED = Path(__file__).parents[4] / "benchmarks/models/llama-3.1-8b/bars-h200.json"


def test_a_figure_that_is_not_known_is_none():
    found = bars.Bars("peer", {"bs1": {"none": Bar(peer=1.0)}})
    assert found.of("bs1", "none") == Bar(peer=1.0)
    assert found.of("bs1", "fp8") == found.of("bs2", "none") == Bar()


@pytest.mark.parametrize("text", ['{"rows": {"bs1": {"none": {"pear": 1}}}}', "[]", "{", "\xff"])
def test_a_file_of_another_form_is_refused(tmp_path: Path, text: str):
    path = tmp_path / "bars.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=str(path)):
        bars.load(path)


def test_a_missing_file_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be read"):
        bars.load(tmp_path / "none.json")


def test_the_shipped_bars_are_in_order():
    found = bars.load(SHIPPED)
    assert set(found.rows) == {START, *(row.name for row in ROWS)}
    for row, by_quant in found.rows.items():
        for bar in by_quant.values():
            steps = [step for step in (bar.must, bar.goal, bar.limit) if step is not None]
            assert steps == sorted(steps, reverse=row == START), row  # of seconds, fewer are better
