"""N-gram drafter: drafts what followed an earlier occurrence of the most recent tokens.

Prompt lookup decoding (Saxena, 2023; "LLMA", arXiv:2304.04487). Almost free, and effective where an
output repeats its prompt or itself: edited code, quotations, tables, names. An edit ends a copy,
and the token after it is often one of those that follow in the copied passage: one token resumes
the copy, though an n-gram elsewhere must be longer.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from inflight.core.batch import Batch, BatchArrays, Chunk, StepOutput
from inflight.core.sequence import Sequence
from inflight.execution.drafters.drafter import DeviceDrafter, DeviceTarget, Target
from inflight.execution.drafters.drafter_spec import DrafterSpec, DraftMethod
from inflight.kv.cache import KVCache
from inflight_kernels.torch_ops.drafting import Copy, propose

# Drafts of the host where a copy is resumed: fewer of them are right, and a CPU takes longer for
# each. If it is right, the next match is longer.
_MAX_RESUMED = 1

_ROOM = 256  # tokens by which a history's array grows


class NgramDrafter:
    """Finds earlier occurrences of a sequence's last tokens (`torch_ops.drafting.find_match`),
    and drafts what followed it.

    Args:
        max_match: longest n-gram to match, tried first.
        min_match: shortest n-gram to match.
    """

    def __init__(self, max_match: int, min_match: int) -> None:
        self._max_match = max_match
        self._min_match = min_match
        self.caches: list[KVCache] = []
        self.from_outputs: set[int] = set()
        self._histories: dict[int, _History] = {}

    def propose(self, chunks: list[Chunk]) -> list[list[int]]:
        return [
            self._matches(chunk.sequence, chunk.num_drafts) if chunk.num_drafts else []
            for chunk in chunks
        ]

    def update(self, batch: Batch, arrays: BatchArrays, output: StepOutput) -> None:
        """Nothing to update: it reads the sequences."""

    def _matches(self, sequence: Sequence, count: int) -> list[int]:
        history = self._histories.get(sequence.request_id)
        if history is None:
            history = self._histories[sequence.request_id] = _History()
        tokens = history.up_to_date(sequence.token_ids)
        drafts, history.copy = propose(
            tokens,
            self._max_match,
            self._min_match,
            count,
            max_resumed=_MAX_RESUMED,
            copy=history.copy,
        )
        return drafts

    def forget(self, sequence: Sequence) -> None:
        self._histories.pop(sequence.request_id, None)


class _History:
    """A sequence's tokens as a growing array.

    Attributes:
        copy: the source of its last drafts; None if it had none.
    """

    def __init__(self) -> None:
        self.copy: Copy | None = None
        self._tokens = np.empty(0, np.int64)
        self._length = 0

    def up_to_date(self, token_ids: list[int]) -> npt.NDArray[np.int64]:
        if len(token_ids) > len(self._tokens):
            tokens = np.empty(len(token_ids) + _ROOM, np.int64)
            tokens[: self._length] = self._tokens[: self._length]
            self._tokens = tokens
        self._tokens[self._length : len(token_ids)] = token_ids[self._length :]
        self._length = len(token_ids)
        return self._tokens[: self._length]


def _load(spec: DrafterSpec) -> NgramDrafter:
    return NgramDrafter(spec.settings.prompt_lookup_max, spec.settings.prompt_lookup_min)


def _load_for_target(spec: DrafterSpec, target: Target) -> NgramDrafter:
    return _load(spec)


def _load_on_device(spec: DrafterSpec, target: DeviceTarget) -> DeviceDrafter:
    from inflight.execution.drafters.device_search import DeviceSearch

    settings = spec.settings
    return DeviceSearch(settings.prompt_lookup_max, settings.prompt_lookup_min, resumes=True)


METHOD = DraftMethod(
    load=_load_for_target,
    load_on_device=_load_on_device,
    needs_history=True,
    load_on_host=_load,
)
