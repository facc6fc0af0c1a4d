"""A target without a server: answers follow a script, at given times."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence

from inflight.cli.bench.serving.targets.target import Arrival, Prompt
from inflight_client import ClientError
from waiting import PATIENCE_S

INPUT_TOKENS_BESIDES_WORDS = 3


class FakeTarget:
    """Answers each prompt with one token per response.

    Args:
        ttft_s: before the first response of each request.
        itl_s: before each further one.
        errors: raised by the first requests instead of an answer, one each.
        two_tokens: words that count as two tokens.
        held_until: no request is answered before so many are in flight.

    Attributes:
        prompts: all that were sent.
        num_in_flight, max_in_flight: requests without an end, now and at most.
        num_cancelled: generators that were closed early.
    """

    def __init__(
        self,
        ttft_s: float = 0.0,
        itl_s: float = 0.0,
        errors: Sequence[ClientError] = (),
        two_tokens: Sequence[str] = (),
        held_until: int = 0,
    ) -> None:
        self._held_until = held_until
        self._may_answer = asyncio.Event()
        self._ttft_s = ttft_s
        self._itl_s = itl_s
        self._errors = list(errors)
        self._two_tokens = frozenset(two_tokens)
        self.prompts: list[Prompt] = []
        self.num_in_flight = self.max_in_flight = self.num_cancelled = 0

    def count(self, prompt: str) -> int:
        """Tokens of a prompt: one per word, or two, and those of the template."""
        words = prompt.split()
        return len(words) + sum(w in self._two_tokens for w in words) + INPUT_TOKENS_BESIDES_WORDS

    async def send(self, prompt: Prompt) -> AsyncGenerator[Arrival, None]:
        self.prompts.append(prompt)
        self.num_in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.num_in_flight)
        is_complete = False
        try:
            if self.num_in_flight >= self._held_until:
                self._may_answer.set()
            if not self._may_answer.is_set():
                await asyncio.wait_for(self._may_answer.wait(), PATIENCE_S)
            await asyncio.sleep(self._ttft_s)
            if self._errors:
                raise self._errors.pop(0)
            for index in range(prompt.output_len):
                if index:
                    await asyncio.sleep(self._itl_s)
                yield Arrival(time.perf_counter(), 1, self.count(prompt.text))
            is_complete = True
        finally:
            self.num_in_flight -= 1
            self.num_cancelled += not is_complete

    async def describe(self) -> dict[str, str]:
        return {"endpoint": "fake", "url": "nowhere:1", "model": "fake"}

    async def aclose(self) -> None:
        pass
