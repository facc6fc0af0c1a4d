"""A runner without a model: the next token is the last one plus one, modulo the vocabulary."""

from __future__ import annotations

from inflight.batch import Batch, StepOutput


class CountingRunner:
    """Counts up; can be told to fail. Satisfies runner.Runner."""

    def __init__(self, num_blocks: int = 64, block_size: int = 4, vocab_size: int = 100) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.batches: list[Batch] = []
        self.raises: Exception | None = None
        self.poisoned: set[int] = set()

    def run(self, batch: Batch) -> StepOutput:
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
        return StepOutput(tokens, [[-0.5] * len(t) for t in tokens], errors)
