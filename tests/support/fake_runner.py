"""Runners without a model: one counts, the other one remembers what each KV slot holds."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from inflight.batch import Batch, Chunk, Done, StepOutput
from inflight.sequence import Sequence


class CountingRunner:
    """The next token is the last one plus one, modulo the vocabulary; can be told to fail.

    Satisfies runner.Runner.
    """

    def __init__(self, num_blocks: int = 64, block_size: int = 4, vocab_size: int = 100) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.steps_ahead = 0
        self.batches: list[Batch] = []
        self.raises: Exception | None = None
        self.poisoned: set[int] = set()

    def launch(self, batch: Batch) -> Done:
        self.batches.append(batch)
        if self.raises is not None:
            raise self.raises
        batch.arrays(self.block_size)
        tokens: list[list[int]] = []
        errors = {}
        for index, chunk in enumerate(batch.chunks):
            if chunk.sequence.request_id in self.poisoned:
                errors[index] = "numerical: poisoned"
            last = chunk.sequence.token_ids[chunk.end - 1]
            tokens.append([(last + 1) % self.vocab_size] if chunk.samples else [])
        return Done(StepOutput(tokens, [[-0.5] * len(t) for t in tokens], errors))


def next_token(token_ids: list[int], vocab_size: int) -> int:
    """A model: any token before decides about the next one."""
    return zlib.crc32(bytes(token_ids)) % vocab_size


def alone(prompt_ids: list[int], max_tokens: int, vocab_size: int = 3) -> list[int]:
    """What a `PagedRunner` says after a prompt when nothing else runs."""
    token_ids = list(prompt_ids)
    for _ in range(max_tokens):
        token_ids.append(next_token(token_ids, vocab_size))
    return token_ids[len(prompt_ids) :]


class PagedRunner:
    """A model of two layers over a paged pool: every slot remembers what was written into it.

    Like a real one it copies blocks, then writes each layer for the whole batch before it reads.
    Layer one holds a token, layer two a digest of what layer one showed of all positions before:
    a slot that is stale, overwritten or another sequence's is told by the first read.

    Like a device it computes batches in the order of their launches, from what the host knew at the
    launch, and hands a result out when it is asked for. It knows each sequence's latest token
    before the host does. Satisfies runner.Runner; token ids are below 256.

    Attributes:
        log: "launch n" and "result n" as they came, n from 0.
        failing_launches, failing_results: the n of those that raise.
        poisoned: ids of requests that fail alone.
    """

    def __init__(
        self, num_blocks: int = 64, block_size: int = 4, steps_ahead: int = 0, vocab_size: int = 3
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.steps_ahead = steps_ahead
        self.log: list[str] = []
        self.failing_launches: set[int] = set()
        self.failing_results: set[int] = set()
        self.poisoned: set[int] = set()
        self.num_launched = 0
        self.num_taken = 0
        self._tokens: dict[int, tuple[int, int]] = {}  # slot -> position, token
        self._digests: dict[int, int] = {}
        # Of each sequence, as of its latest chunk: generation, all tokens with the one chosen.
        self._known: dict[Sequence, tuple[int, list[int]]] = {}

    def launch(self, batch: Batch) -> LateStep:
        number = self.num_launched
        self.log.append(f"launch {number}")
        self.num_launched += 1
        if number in self.failing_launches:
            self.num_taken += 1  # no result follows
            raise RuntimeError("the launch failed")
        assert self.num_launched - self.num_taken <= self.steps_ahead + 1, "too far ahead"
        return LateStep(self, number, self._compute(batch))

    def _compute(self, batch: Batch) -> StepOutput:
        self._copy(batch.copies)
        tokens = [self._tokens_of(chunk) for chunk in batch.chunks]
        slots = [self._slots_of(chunk) for chunk in batch.chunks]
        written: set[int] = set()
        for chunk, own, ids in zip(batch.chunks, slots, tokens, strict=True):
            for position in range(chunk.start, chunk.end):
                assert own[position] not in written, "one slot, two writers"
                written.add(own[position])
                self._tokens[own[position]] = (position, ids[position])
        for chunk, own in zip(batch.chunks, slots, strict=True):
            seen = [self._tokens[slot] for slot in own]
            assert [position for position, _ in seen] == list(range(chunk.end)), "wrong positions"
            history = bytes(token for _, token in seen)
            for position in range(chunk.start, chunk.end):
                self._digests[own[position]] = zlib.crc32(history[: position + 1])
        output = StepOutput([], [])
        for index, (chunk, own, ids) in enumerate(zip(batch.chunks, slots, tokens, strict=True)):
            expected = [zlib.crc32(bytes(ids[: i + 1])) for i in range(chunk.end)]
            assert [self._digests[slot] for slot in own] == expected, "read another's KV"
            chosen = [next_token(ids, self.vocab_size)] if chunk.samples else []
            self._known[chunk.sequence] = (chunk.generation, ids + chosen)
            output.token_ids.append(chosen)
            output.logprobs.append([-0.5] * len(chosen))
            if chunk.sequence.request_id in self.poisoned:
                output.errors[index] = "numerical: poisoned"
        return output

    def _copy(self, copies: Iterable[tuple[int, int]]) -> None:
        size = self.block_size
        for source, target in copies:
            for offset in range(size):
                self._tokens.pop(target * size + offset, None)
                self._digests.pop(target * size + offset, None)
                if source * size + offset in self._tokens:
                    self._tokens[target * size + offset] = self._tokens[source * size + offset]
                    self._digests[target * size + offset] = self._digests[source * size + offset]

    def _tokens_of(self, chunk: Chunk) -> list[int]:
        """All tokens up to the chunk's end: the host's, then the device's."""
        ids = chunk.sequence.token_ids[: chunk.end]
        if len(ids) < chunk.end:
            assert self.steps_ahead, "the host must know all tokens"
            assert chunk.length == 1, "a prompt with a token that the host does not know"
            generation, known = self._known[chunk.sequence]
            assert generation == chunk.generation, "a token of an earlier life"
            assert known[: len(ids)] == ids
            ids = known[: chunk.end]
        assert len(ids) == chunk.end, "a token that nobody has chosen"
        return ids

    def _slots_of(self, chunk: Chunk) -> list[int]:
        size, blocks = self.block_size, chunk.sequence.blocks
        return [blocks[p // size] * size + p % size for p in range(chunk.end)]


class LateStep:
    """A step that has run, whose result nobody has seen."""

    def __init__(self, runner: PagedRunner, number: int, output: StepOutput) -> None:
        self._runner = runner
        self._number = number
        self._output = output

    def result(self) -> StepOutput:
        runner = self._runner
        runner.log.append(f"result {self._number}")
        runner.num_taken += 1
        if self._number in runner.failing_results:
            raise RuntimeError("the step failed")
        return self._output
