"""Runners without a model: one counts, the other one tracks the contents of KV slots."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterable

import numpy as np

from inflight.core.batch import Batch, Chunk, CompletedStep, Load, StepOutput, Store
from inflight.core.kernel_blocks import KernelBlocks
from inflight.core.request import Candidate
from inflight.core.sequence import Sequence
from inflight.execution.runner import HostMemory
from inflight.kv.layout import KVTables
from inflight.scheduling.draft_budget import StepCosts


class CountingRunner:
    """The next token is the last one plus one, modulo the vocabulary; can be made to fail.

    Satisfies runner.Runner.
    """

    def __init__(self, num_blocks: int = 64, block_size: int = 4, vocab_size: int = 100) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.kv_tables = KVTables.single(block_size)
        self.host_memory: HostMemory | None = None
        self.vocab_size = vocab_size
        self.max_rows = 1 << 20
        self.steps_ahead = 0
        self.step_costs: StepCosts | None = None
        self.supports_host_drafts = True
        self.gpu_budget_bytes = 0
        self.batches: list[Batch] = []
        self.raises: Exception | None = None
        self.poisoned: set[int] = set()

    def launch(self, batch: Batch) -> CompletedStep:
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
        return CompletedStep(StepOutput(tokens, [[-0.5] * len(t) for t in tokens], errors))

    def take_stored(self) -> list[int]:
        return []

    def forget(self, sequence: Sequence) -> None:
        pass


def next_token(token_ids: list[int], vocab_size: int) -> int:
    """A model: any token before decides about the next one."""
    return zlib.crc32(bytes(token_ids)) % vocab_size


def score(token_ids: list[int], token_id: int) -> Candidate:
    """What that model thinks of a token after others."""
    digest = zlib.crc32(bytes([*token_ids, token_id]))
    return Candidate(token_id, -(digest % 1000) / 100, 1 + digest % 7)


def alone(prompt_ids: list[int], max_tokens: int, vocab_size: int = 3) -> list[int]:
    """The output of a `PagedRunner` after a prompt when nothing else runs."""
    token_ids = list(prompt_ids)
    for _ in range(max_tokens):
        token_ids.append(next_token(token_ids, vocab_size))
    return token_ids[len(prompt_ids) :]


_Held = tuple[tuple[int, int, int], int]
"""What a slot holds: table, position and token; and the digest."""

NUM_NAMED = 8
NAMED = range(NUM_NAMED)
"""Tokens that are candidates for what follows."""


def candidates(token_ids: list[int], count: int, named: range = NAMED) -> list[Candidate]:
    """The most_probable of them, the most_probable first; which it is, any token before decides."""
    digests = {one: zlib.crc32(bytes([*token_ids, one])) for one in named}
    logprobs = {one: -(1 + digest % 1_000_003) / 200_000 for one, digest in digests.items()}
    ids = sorted(named, key=lambda one: -logprobs[one])[:count]
    return [Candidate(one, logprobs[one], rank) for rank, one in enumerate(ids, 1)]


class PagedRunner:
    """A model of two layers over a paged pool: every slot remembers what was written into it.

    Like a real one it copies blocks, then writes each layer for the whole batch before it reads.
    Layer one holds a token, layer two a digest of what layer one showed of all positions before:
    a slot that is stale, overwritten or another sequence's is detected by the first read.

    Like a device it computes batches in the order of their launches, from what the host knew at the
    launch, and hands a result out when it is asked for. It knows each sequence's latest token
    before the host does. Satisfies runner.Runner; token ids are below 256.

    Attributes:
        draft: guesses the tokens after those given, as many as it is asked for or fewer.
        log: "launch n" and "result n" as they came, n from 0.
        failing_launches, failing_results: the n of those that raise.
        poisoned: ids of requests that fail alone.
        written: blocks that the last launch wrote to.
        named: tokens that are candidates for what follows.
        storing: copies to host memory that have not ended.
        stores_at_once: how many of them end by each `take_stored`.
    """

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        steps_ahead: int = 0,
        vocab_size: int = 3,
        kv_tables: KVTables | None = None,
        host_slots: int = 0,
    ) -> None:
        memory = HostMemory(np.zeros((host_slots, 1), np.uint8))
        self.host_memory = memory if host_slots else None
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.kv_tables = kv_tables or KVTables.single(block_size)
        self.vocab_size = vocab_size
        self.max_rows = 1 << 20
        self.steps_ahead = steps_ahead
        self.step_costs: StepCosts | None = None
        self.supports_host_drafts = True
        self.gpu_budget_bytes = 0
        self.draft: Callable[[list[int], int], list[int]] = lambda ids, count: []
        self.log: list[str] = []
        self.failing_launches: set[int] = set()
        self.failing_results: set[int] = set()
        self.poisoned: set[int] = set()
        self.num_launched = 0
        self.num_taken = 0
        self.written: set[int] = set()
        self.named = NAMED
        self.storing: list[Store] = []
        self.stores_at_once = 1 << 20
        self._late_loads: list[Load] = []
        # Blocks in host memory: by slot, what their slots in the pool held.
        self._in_host: dict[int, list[_Held | None]] = {}
        # By slot: table, position, token; and the digest of all tokens up to it. Layers of all
        # tables share the memory of a block, so that here they share its slots.
        self._tokens: dict[int, tuple[int, int, int]] = {}
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

    def take_stored(self) -> list[int]:
        """A store reads its block as late as it may."""
        count = self.stores_at_once
        ended, self.storing = self.storing[:count], self.storing[count:]
        for store in ended:
            self._in_host[store.slot] = [self._held(slot) for slot in self._slots_in(store.block)]
        return [store.ticket for store in ended]

    def forget(self, sequence: Sequence) -> None:
        pass

    def _load(self, loads: list[Load]) -> None:
        for load in loads:
            held = self._in_host[load.slot]
            for slot, content in zip(self._slots_in(load.block), held, strict=True):
                self._tokens.pop(slot, None)
                self._digests.pop(slot, None)
                if content is not None:
                    self._tokens[slot], self._digests[slot] = content

    def _held(self, slot: int) -> _Held | None:
        return (self._tokens[slot], self._digests[slot]) if slot in self._tokens else None

    def _slots_in(self, block: int) -> list[int]:
        """The slots of a block of the pool."""
        most = max(table.kernel_blocks for table in self.kv_tables.tables)
        size = self.block_size
        blocks = KernelBlocks(most, self.num_blocks).ids([block])
        return [one * size + offset for one in blocks for offset in range(size)]

    def _compute(self, batch: Batch) -> StepOutput:
        self._load(self._late_loads)
        self._late_loads = []
        if batch.reads_loads:
            self._load(batch.loads)
        else:  # as late as they may be
            self._late_loads = batch.loads
        self.storing += batch.stores
        self.written = {target for _, target in batch.copies} | {one.block for one in batch.loads}
        self._copy(batch.copies)
        rows = [self._rows_of(chunk) for chunk in batch.chunks]
        for table in range(len(self.kv_tables.tables)):
            self._write_and_read(batch, rows, table)
        output = StepOutput([], [])
        for index, (chunk, own) in enumerate(zip(batch.chunks, rows, strict=True)):
            chosen = own.choose(self.vocab_size) if chunk.samples else []
            self._known[chunk.sequence] = (chunk.generation, own.ids[: own.known] + chosen)
            output.token_ids.append(chosen)
            output.logprobs.append([-0.5] * len(chosen))
            if chunk.num_drafts:
                output.num_drafted[index] = own.end - own.known
            if chunk.samples and chunk.sequence.num_candidates is not None:
                found = candidates(own.ids[: own.known], chunk.sequence.num_candidates, self.named)
                output.candidates[index] = [found[::-1]]  # ranks say the order
            if chunk.num_scores:
                first = own.end - chunk.samples - chunk.num_scores
                output.prompt_candidates[index] = [
                    [score(own.ids[: first + i + 1], token)]
                    for i, token in enumerate(chunk.scored_ids)
                ]
            if chunk.sequence.request_id in self.poisoned:
                output.errors[index] = "numerical: poisoned"
        return output

    def _write_and_read(self, batch: Batch, rows: list[_Rows], table: int) -> None:
        """Compute all chunks in the layers of one table."""
        size, first_kept = self.block_size, self.kv_tables.tables[table].first_kept
        slots = [
            self._slots_of(chunk, own.end, table)
            for chunk, own in zip(batch.chunks, rows, strict=True)
        ]
        written: set[int] = set()
        for chunk_slots, own in zip(slots, rows, strict=True):
            for position in range(own.start, own.end):
                slot = chunk_slots[position]
                assert slot not in written, "one slot, two writers"
                written.add(slot)
                self.written.add(slot // size % self.num_blocks)
                self._tokens[slot] = (table, position, own.ids[position])
                self._digests[slot] = zlib.crc32(bytes(own.ids[: position + 1]))
        for chunk_slots, own in zip(slots, rows, strict=True):
            for position in range(first_kept(own.start), own.end):
                slot = chunk_slots[position]
                assert self._tokens[slot] == (table, position, own.ids[position]), "not its token"
                digest = zlib.crc32(bytes(own.ids[: position + 1]))
                assert self._digests[slot] == digest, "read another's KV"

    def _copy(self, copies: Iterable[tuple[int, int]]) -> None:
        most = max(table.kernel_blocks for table in self.kv_tables.tables)
        split = KernelBlocks(most, self.num_blocks)
        size = self.block_size
        for pair in copies:
            for source, target in zip(*(split.ids([block]) for block in pair), strict=True):
                for offset in range(size):
                    old, new = source * size + offset, target * size + offset
                    self._tokens.pop(new, None)
                    self._digests.pop(new, None)
                    if old in self._tokens:
                        self._tokens[new] = self._tokens[old]
                        self._digests[new] = self._digests[old]

    def _rows_of(self, chunk: Chunk) -> _Rows:
        """What a chunk computes: the host's tokens or the device's, then what is drafted."""
        length = chunk.length - chunk.num_drafts
        ids = chunk.sequence.token_ids[: chunk.start + length]
        if len(ids) < chunk.start + length:
            assert self.steps_ahead, "the host must know all tokens"
            assert length == 1, "a prompt with a token that the host does not know"
            generation, known = self._known[chunk.sequence]
            assert generation == chunk.generation, "a token of an earlier life"
            assert known[: len(ids)] == ids
            # The host counts drafts as accepted until the results arrive.
            assert len(ids) < len(known) <= chunk.start + length, "a token that was not sampled"
            ids = known
        drafts = self.draft(ids, chunk.num_drafts)[: chunk.num_drafts]
        return _Rows(len(ids) - length, len(ids), ids + drafts)

    def _slots_of(self, chunk: Chunk, end: int, table: int) -> list[int]:
        size, count = self.block_size, self.kv_tables.tables[table].kernel_blocks
        blocks = KernelBlocks(count, self.num_blocks).ids(chunk.sequence.tables[table])
        return [blocks[p // size] * size + p % size for p in range(end)]


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Tokens [start, end) are computed; those from `known` on are drafts."""

    start: int
    known: int
    ids: list[int]

    @property
    def end(self) -> int:
        return len(self.ids)

    def choose(self, vocab_size: int) -> list[int]:
        """The drafts that are right, and the token after them."""
        chosen: list[int] = []
        for draft in [*self.ids[self.known :], None]:
            chosen.append(next_token(self.ids[: self.known] + chosen, vocab_size))
            if chosen[-1] != draft:
                break
        return chosen


class LateStep:
    """A step that has run, whose result has not been read."""

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
