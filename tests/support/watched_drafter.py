"""An instrumented GPU drafter, on kernels or their reference implementations."""

from __future__ import annotations

import torch

from inflight.core.request import Request
from inflight.engine.engine import Engine, generate
from inflight.execution.batch.device_batch import DeviceBatch
from inflight.execution.drafters.drafter import DeviceDrafter


class Watched(DeviceDrafter):
    """A drafter whose drafts are looked at, and some of them replaced.

    Args:
        engine: whose drafter it takes the place of.
        expected: what will be said; where given, some drafts are replaced by right ones.

    Attributes:
        proposed: of greedy sequences: request, tokens said before, and what was guessed.
    """

    def __init__(self, engine: Engine, expected: dict[int, list[int]] | None = None) -> None:
        self._drafter: DeviceDrafter = engine.runner.drafter  # type: ignore[attr-defined]
        self._vocab_size = engine.runner.vocab_size
        self._expected = expected
        self.caches = self._drafter.caches
        self.has_update = self._drafter.has_update
        self.forward = self._drafter.forward  # type: ignore[method-assign]
        self.update = self._drafter.update  # type: ignore[method-assign]
        self.proposed: list[tuple[int, int, list[int]]] = []
        self.count = 0
        engine.runner.drafter = self  # type: ignore[attr-defined]

    def draft(self, batch: DeviceBatch, num_chunks: int, num_drafts: int) -> None:
        self._drafter.draft(batch, num_chunks, num_drafts)
        slots = set(batch.step.sample_slots[:num_chunks].tolist())
        positions = batch.state.last_positions.tolist()
        drafts = batch.state.drafts.tolist()
        for resident in batch._residents.values():
            if resident.slot not in slots or resident.is_stale:
                continue
            sequence, own = resident.sequence, drafts[resident.slot]
            done = positions[resident.slot] + 1 - sequence.num_prompt_tokens
            if sequence.request.params.temperature == 0.0:
                self.proposed.append((sequence.request_id, done, list(own)))
            self.count += 1
            if self._expected is not None and self.count % 2:
                rest = self._expected[sequence.request_id][done : done + len(own)]
                own[: len(rest)] = rest
            if self.count % 3 == 0:
                place = self.count // 3 % len(own)
                own[place] = (own[place] + 1) % self._vocab_size
            batch.state.drafts[resident.slot] = torch.tensor(own, dtype=torch.int32)


def generate_twice(engine: Engine, requests: list[Request], expected: dict[int, list[int]]) -> None:
    """The second time all of a prompt is in the cache, and its last block may be copied.

    Request ids are below 100.
    """
    assert generate(engine, requests) == expected
    if engine.config.enable_prefix_caching:
        again = [Request(100 + one.request_id, one.prompt_ids, one.params) for one in requests]
        outputs = generate(engine, again)
        assert outputs == {100 + request_id: ids for request_id, ids in expected.items()}
