"""Prompts of an exact number of tokens."""

from __future__ import annotations

import asyncio
import random

import pytest

from fake_target import FakeTarget
from inflight.cli.bench.serving.workload import prompts
from inflight.cli.bench.serving.workload.prompts import PromptMaker
from inflight.cli.bench.serving.workload.words import WORDS
from inflight.errors import ConfigError


def learn(target: FakeTarget) -> tuple[PromptMaker, int]:
    """The maker, and how many prompts were counted for it."""
    counted = 0

    async def count(prompt: str) -> int:
        nonlocal counted
        counted += 1
        return target.count(prompt)

    return asyncio.run(prompts.learn(count)), counted


def test_a_prompt_has_exactly_the_tokens() -> None:
    target = FakeTarget(two_tokens=WORDS[3::17])
    maker, _ = learn(target)
    source = random.Random(0)
    assert [target.count(maker.make(n, source)) for n in (5, 64, 777)] == [5, 64, 777]


def test_words_of_several_tokens_are_found_with_few_questions() -> None:
    several = WORDS[3::40]
    maker, num_counted = learn(FakeTarget(two_tokens=several))
    assert set(maker.words) == set(WORDS) - set(several)
    assert num_counted < len(WORDS) / 2


def test_the_shortest_prompt_has_a_random_word() -> None:
    target = FakeTarget()
    maker, _ = learn(target)
    source = random.Random(0)
    texts = {maker.make(1, source) for _ in range(50)}
    assert {target.count(text) for text in texts} == {maker.min_tokens} == {5}
    assert len(texts) > 20


def test_prompts_differ_from_the_second_word_on() -> None:
    maker, _ = learn(FakeTarget())
    source = random.Random(0)
    starts = {tuple(maker.make(64, source).split()[:12]) for _ in range(200)}
    assert len(starts) == 200


def test_a_shared_prefix_is_part_of_the_length() -> None:
    target = FakeTarget()
    maker, _ = learn(target)
    source = random.Random(0)
    shared = maker.with_prefix(32, source)
    texts = [shared.make(64, source) for _ in range(20)]
    assert {target.count(text) for text in texts} == {64}
    # 3 tokens are those of the template.
    assert len({tuple(text.split()[:29]) for text in texts}) == 1
    assert len({tuple(text.split()[29:40]) for text in texts}) == 20


def test_a_tokenizer_without_words_of_one_token_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"0 of \d+ common English words.*--lengths"):
        learn(FakeTarget(two_tokens=WORDS))


def test_a_server_that_does_not_count_is_refused() -> None:
    async def count(prompt: str) -> int:
        return 0

    with pytest.raises(ConfigError, match="does not report the number of input tokens"):
        asyncio.run(prompts.learn(count))
