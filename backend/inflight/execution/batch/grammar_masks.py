"""Grammar masks of a step, computed in parallel with the forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

from inflight.core.batch import Batch, StepOutput
from inflight.core.output_grammar import Masks


class GrammarMasks:
    """Bits of the allowed tokens for each row of a step's logits.

    Args:
        batch: of the step.
        drafts: for each of its chunks.
    """

    def __init__(self, batch: Batch, drafts: Sequence[Sequence[int]]) -> None:
        self._errors: dict[int, str] = {}
        self._rows: dict[int, Masks] = {}
        self._places = [
            index
            for index, chunk in enumerate(batch.chunks)
            if chunk.samples and chunk.sequence.grammar is not None
        ]
        self._future: Future[None] | None = None
        if self._places:
            try:
                thread = _thread()
            except RuntimeError:  # it cannot be started: slower, but as good
                self._fill(batch, drafts)
            else:
                self._future = thread.submit(self._fill, batch, drafts)

    def of_row(self, index: int, count: int) -> Masks | None:
        """[ceil(V / 32)] for the row after `count` drafts of a chunk; None if all are allowed."""
        self._wait()
        rows = self._rows.get(index)
        return None if rows is None else rows[count]

    def report(self, output: StepOutput) -> None:
        """Report the sequences whose grammar failed."""
        self._wait()
        for index, reason in self._errors.items():
            output.errors.setdefault(index, reason)

    def _wait(self) -> None:
        if self._future is not None:
            self._future.result()
            self._future = None

    def _fill(self, batch: Batch, drafts: Sequence[Sequence[int]]) -> None:
        grammars = [batch.chunks[index].sequence.grammar for index in self._places]
        states = [grammar for grammar in grammars if grammar is not None]
        rows, failures = states[0].fill_masks(states, [drafts[index] for index in self._places])
        self._rows = dict(zip(self._places, rows, strict=True))
        self._errors = {self._places[place]: str(error) for place, error in failures.items()}


@cache
def _thread() -> ThreadPoolExecutor:
    """Beside the launching thread: masks are computed without the GIL. Raises RuntimeError if it
    cannot be started."""
    executor = ThreadPoolExecutor(1, "masks")
    executor.submit(int)
    return executor
