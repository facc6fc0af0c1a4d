"""Conversations that come back: what is asked, what is measured, the script."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import conversations
from conversations import Lengths, Served, Size, Turn
from small_checkpoint import write

LENGTHS = Lengths(16, 64, 32, 8, chats=6, turns=3, trees=2, branches=2, rounds=2)
OPTIONS = [f"--{name}={getattr(LENGTHS, name)}" for name in LENGTHS.__slots__]


class Counter:
    """Draws tokens that are all different."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, count: int) -> list[int]:
        self._next += count
        return list(range(self._next - count, self._next))


def prompts(case: str) -> list[list[list[int]]]:
    """By round."""
    draw = Counter()
    found = []
    for turns in conversations.CASES[case](draw, LENGTHS):
        found.append([_answer(turn, draw) for turn in turns])
    return found


def _answer(turn: Turn, draw: Counter) -> list[int]:
    prompt = turn.conversation.ids + turn.added
    turn.conversation.ids = prompt + draw(LENGTHS.output)
    return prompt


def test_a_turn_of_a_chat_is_asked_with_the_whole_conversation() -> None:
    rounds = prompts("chats")
    assert [len(one) for one in rounds] == [6, 6, 6]
    for before, after in itertools.pairwise(rounds):
        for earlier, later in zip(before, after, strict=True):
            assert later[: len(earlier)] == earlier
            assert len(later) == len(earlier) + LENGTHS.output + LENGTHS.user
    system = {tuple(one[: LENGTHS.system]) for one in rounds[0]}
    assert len(system) == 1
    assert len({tuple(one) for one in rounds[0]}) == 6


def test_agents_fork_from_what_their_parents_have_computed() -> None:
    roots, first, second = prompts("agents")
    # Each of two roots has two branches; each of these forks a sub-agent after its first call.
    assert (len(roots), len(first), len(second)) == (2, 4, 8)
    for index, branch in enumerate(first):
        assert branch[: len(roots[0])] == roots[index // 2]
    for index, agent in enumerate(second):
        assert agent[: len(first[0])] == first[index % 4]
    assert len({tuple(one) for one in second}) == 8


def test_unrelated_prompts_have_the_lengths_of_chats_and_nothing_in_common() -> None:
    rounds, same_lengths = prompts("unrelated"), prompts("chats")
    lengths = [[len(one) for one in turns] for turns in rounds]
    assert lengths == [[len(one) for one in turns] for turns in same_lengths]
    ids = [token for turns in rounds for one in turns for token in one]
    assert len(set(ids)) == len(ids)


def test_the_size_of_a_case_counts_common_tokens_once() -> None:
    one_chat = 64 + 2 * 32 + 3 * 8
    assert Size.of("chats", LENGTHS) == Size(16 + 6 * one_chat, 16 + one_chat)
    assert Size.of("unrelated", LENGTHS) == Size.of("chats", LENGTHS)
    one_tree = 64 + 8 + (2 + 4) * (32 + 8)
    assert Size.of("agents", LENGTHS) == Size(16 + 2 * one_tree, 16 + 64 + 8 + 2 * 40)


def served(number: int, ttft_s: float, num_cached: int) -> Served:
    return Served(number, 100 + 100 * number, 100 * number, 0.0, num_cached, ttft_s)


def test_first_and_later_turns_have_hit_rates_and_ttft_of_their_own() -> None:
    found = conversations.figures([served(0, 1.0, 0), served(1, 0.1, 50), served(2, 0.3, 200)])
    assert found["hit_rate_first"] == 0.0
    assert (found["hit_rate_later"], found["reusable"]) == (0.5, 0.6)
    assert found["ttft_first_p50_ms"] == 1000.0
    assert found["ttft_later_p50_ms"] == 200.0
    assert found["ttft_p50_ms_by_turn"] == [1000.0, 100.0, 300.0]


def test_a_variant_is_compared_with_the_first_one() -> None:
    base = {"variant": "off", "ttft_later_p50_ms": 200.0}
    found = conversations.compare(base, {"variant": "host", "ttft_later_p50_ms": 50.0})
    assert found == {"ttft_later_of_off": 0.25}
    assert conversations.compare(base, {"variant": "host"}) == {}
    assert conversations.same_outputs([[1, 2], [3]], [[1, 2], [4]]) == 0.5


def script(model: Path, *options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, conversations.__file__, "--model", model, "--device", "echo"]
    return subprocess.run(
        [str(word) for word in (*command, "--concurrency", "2", *OPTIONS, *options)],
        capture_output=True,
        text=True,
        check=False,
    )


def measured(tmp_path: Path, *options: str) -> list[dict[str, Any]]:
    written = tmp_path / "result.json"
    done = script(write(tmp_path / "model"), "--result", written, *options)
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(written.read_text())["rows"]
    return rows


def test_what_was_evicted_is_no_hit_when_a_chat_comes_back(tmp_path: Path) -> None:
    small, whole, none = measured(
        tmp_path,
        *("--case", "chats", "--pool-share", "0.5", "--variants", "off"),
        *("--variant", "whole", "num_blocks=128"),
        *("--variant", "none", "num_blocks=128", "enable_prefix_caching=false"),
    )
    assert [one["variant"] for one in (small, whole, none)] == ["off", "whole", "none"]
    # Whole blocks, and the last token of an answer is not among them.
    assert whole["reusable"] - 0.15 < whole["hit_rate_later"] <= whole["reusable"]
    assert small["hit_rate_later"] < whole["hit_rate_later"] / 2
    assert none["hit_rate_later"] == 0.0
    assert small["ttft_later_of_off"] == 1.0
    assert [one["same_outputs"] for one in (small, whole, none)] == [1.0] * 3


def test_agents_and_unrelated_prompts_are_measured_too(tmp_path: Path) -> None:
    agents, unrelated = measured(
        tmp_path, "--case", "agents,unrelated", "--pool-share", "1", "--variants", "off"
    )
    assert (agents["case"], agents["requests"]) == ("agents", 2 + 4 + 8)
    assert agents["hit_rate_later"] > 0.5
    assert (unrelated["reusable"], unrelated["hit_rate_later"]) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--variant", "odd", "no_such=1"), "variant odd: .*no_such"),
        (("--variants", "of"), "'of' is unknown; allowed: off, recompute, host"),
        (("--pool-share", "0.1"), "chats: a pool of 80 tokens does not hold 2 sequences of 168"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(
    options: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    done = script(write(tmp_path / "model"), "--pool-share", "1", "--variants=off", *options)
    assert done.returncode == 1
    assert re.search(message, done.stderr), done.stderr
