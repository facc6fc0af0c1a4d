"""Lengths of prompts and outputs."""

from __future__ import annotations

import random
import statistics
from pathlib import Path

import pytest

from inflight.cli.bench.serving.workload import lengths
from inflight.cli.bench.serving.workload.lengths import NAMED, Drawn, LogNormal, Normal, Shape
from inflight.errors import ConfigError


def draws(found: lengths.Lengths, count: int = 4000) -> list[Shape]:
    source = random.Random(1)
    return [found.draw(source, index) for index in range(count)]


def test_a_mean_alone_is_a_fixed_length() -> None:
    fixed = Drawn(lengths.spread("512", "--input-tokens"), lengths.spread("64", "--output-tokens"))
    assert set(draws(fixed, 50)) == {Shape(512, 64)}


def test_a_deviation_spreads_lengths_around_the_mean() -> None:
    found = [one.input_len for one in draws(Drawn(lengths.spread("512:64", "x"), Normal(1)))]
    assert statistics.fmean(found) == pytest.approx(512, abs=5)
    assert statistics.stdev(found) == pytest.approx(64, rel=0.05)
    assert all(
        one >= 1 for one in (shape.input_len for shape in draws(Drawn(Normal(2, 9), Normal(1))))
    )


@pytest.mark.parametrize(
    "text", ["", "0", "x", "5:-1", "5:x", "inf", "5:inf", "nan", "-3", "1:2:3"]
)
def test_other_spreads_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--input-tokens: .*MEAN:SD"):
        lengths.spread(text, "--input-tokens")


def test_named_lengths_have_the_medians_of_their_traces() -> None:
    medians = {
        name: tuple(
            statistics.median(getattr(one, field) for one in draws(found))
            for field in ("input_len", "output_len")
        )
        for name, found in NAMED.items()
    }
    # exp(mu), a little less where the cut removes the upper part of the distribution.
    assert medians["chat"] == (pytest.approx(740, rel=0.08), pytest.approx(142, rel=0.08))
    assert medians["rag"] == (pytest.approx(2660, rel=0.05), pytest.approx(208, rel=0.08))
    assert medians["agents"] == (pytest.approx(857, rel=0.1), pytest.approx(245, rel=0.12))


def test_a_log_normal_length_is_cut() -> None:
    found = LogNormal(5.0, 2.0, 300)
    source = random.Random(0)
    values = [found.draw(source) for _ in range(500)]
    assert min(values) >= 1 and 250 < max(values) <= 300


def test_a_file_is_read_in_order_and_from_its_start_again(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"input_tokens": 5, "output_tokens": 2}\n\n'
        '{"timestamp": 3, "input_length": 7, "output_length": 4, "hash_ids": [1]}\n'
        '{"prompt": "Hello there", "output_tokens": 9}\n'
    )
    found = draws(lengths.named(str(path)), 4)
    assert found == [Shape(5, 2), Shape(7, 4), Shape(0, 9, "Hello there"), Shape(5, 2)]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("5", "line 1: not a JSON object"),
        ("{", "line 1: not a JSON object"),
        ('{"output_tokens": 5}', "input_tokens is None"),
        ('{"input_tokens": 0, "output_tokens": 5}', "input_tokens is 0"),
        ('{"input_tokens": 5, "output_tokens": true}', "output_tokens is True"),
        ('{"prompt": 5, "output_tokens": 5}', "prompt is not a string"),
        ("", "has no line"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, error: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match=error):
        lengths.named(str(path))


def test_an_unknown_name_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="did you mean 'chat'"):
        lengths.named("chats")


def test_lengths_are_drawn_until_they_fit_the_context() -> None:
    source = random.Random(0)
    found = [lengths.draw_fitting(NAMED["rag"], source, i, 2048) for i in range(200)]
    assert all(one.input_len + one.output_len <= 2048 for one in found)
    with pytest.raises(ConfigError, match="--max-model-len"):
        lengths.draw_fitting(Drawn(Normal(100), Normal(100)), source, 0, 128)


def test_scaled_lengths_keep_their_spread_and_their_prompts() -> None:
    found = LogNormal(6.0, 0.5, 1000).scaled(0.1)
    values = [found.draw(random.Random(index)) for index in range(2000)]
    assert statistics.median(values) == pytest.approx(40, rel=0.05)  # exp(6) is 403
    assert max(values) <= 100
    assert Normal(512, 64).scaled(0.5) == Normal(256, 32)
    assert Normal(2).scaled(0.1) == Normal(1)
    listed = lengths.Listed((Shape(100, 7), Shape(0, 30, "a prompt")))
    assert listed.scaled(0.1) == lengths.Listed((Shape(10, 1), Shape(0, 3, "a prompt")))
