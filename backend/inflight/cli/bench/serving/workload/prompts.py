"""Prompts of an exact number of tokens, made of words that are one token each.

The server counts: a prompt of the first word shows what a prompt has besides its words (special
tokens, a chat template), and prompts of all words, then of halves of those whose number is not as
expected, show which words are more than one token. The first word is the same in all prompts; the
others are random, so no two prompts share a block of the prefix cache unless they are meant to.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from inflight.cli.bench.serving.workload.words import WORDS
from inflight.errors import ConfigError

Count = Callable[[str], Awaitable[int]]
"""From a prompt to its number of tokens, as the server counts them."""

FIRST = "The"
MIN_WORDS = 64
# Words per prompt that is counted: it must fit small contexts.
_BATCH = 64


@dataclass(frozen=True, slots=True)
class PromptMaker:
    """
    Attributes:
        words: of one token each.
        overhead: tokens of a prompt with the first word alone.
        prefix: words that all prompts begin with.
    """

    words: tuple[str, ...]
    overhead: int
    prefix: tuple[str, ...] = ()

    def make(self, num_tokens: int, source: random.Random) -> str:
        """A prompt of `num_tokens`, or of `min_tokens` if that is more."""
        count = max(1, num_tokens - self.overhead - len(self.prefix))
        return " ".join((FIRST, *self.prefix, *source.choices(self.words, k=count)))

    @property
    def min_tokens(self) -> int:
        """Of the shortest prompt: each has a random word."""
        return self.overhead + len(self.prefix) + 1

    def with_prefix(self, num_tokens: int, source: random.Random) -> PromptMaker:
        """All prompts share their first `num_tokens` tokens."""
        prefix = source.choices(self.words, k=max(0, num_tokens - self.overhead))
        return PromptMaker(self.words, self.overhead, tuple(prefix))


async def learn(count: Count, words: Sequence[str] = WORDS) -> PromptMaker:
    """Find the words of one token.

    Raises:
        ConfigError: the server does not count tokens, or has too few such words.
    """
    overhead = await count(FIRST)
    if overhead < 1:
        raise ConfigError(
            "the server does not report the number of input tokens, so prompts of an exact length "
            "cannot be made; give prompts with --lengths FILE.jsonl"
        )
    found: list[str] = []
    for start in range(0, len(words), _BATCH):
        found += await _single(count, overhead, words[start : start + _BATCH])
    if len(found) < MIN_WORDS:
        raise ConfigError(
            f"{len(found)} of {len(words)} common English words are one token for this model, too "
            f"few for prompts of an exact length (at least {MIN_WORDS}); give prompts with "
            "--lengths FILE.jsonl"
        )
    return PromptMaker(tuple(found), overhead)


async def _single(count: Count, overhead: int, words: Sequence[str]) -> list[str]:
    """Those of one token. A word has at least one, so a sum of one each proves it for all."""
    if await count(" ".join((FIRST, *words))) - overhead == len(words):
        return list(words)
    if len(words) == 1:
        return []
    middle = len(words) // 2
    return [
        *await _single(count, overhead, words[:middle]),
        *await _single(count, overhead, words[middle:]),
    ]
