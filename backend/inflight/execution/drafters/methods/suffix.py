"""Suffix drafter: drafts what followed the longest suffix of the text that occurs earlier.

SAM-Decoding (Hu et al., arXiv:2411.10666) and SuffixDecoding (Oliaro et al., arXiv:2411.04975) over
the tokens of the sequence itself. `ngram` drafts as many tokens after 2 equal ones as after 200;
here a match of n tokens drafts at most 2 n: many where the text copies, few or none elsewhere.

On the host a suffix automaton follows each sequence, and the first occurrence counts. A GPU, which
alone knows the last tokens there, compares with all earlier places at once, and the latest counts;
either is as often right. The host can look in the outputs of earlier requests as well; it is the
host that drafts for sequences that need committed tokens, with a GPU, too.
"""

from __future__ import annotations

from inflight.core.batch import Batch, BatchArrays, Chunk, StepOutput
from inflight.core.request import FinishReason
from inflight.core.sequence import Sequence
from inflight.execution.drafters.drafter import DeviceDrafter, DeviceTarget, Target
from inflight.execution.drafters.drafter_spec import DrafterSpec, DraftMethod
from inflight.execution.drafters.output_cache import CachedMatches, OutputCache
from inflight.execution.drafters.suffix_automaton import Match, SuffixAutomaton
from inflight.kv.cache import KVCache
from inflight_kernels.torch_ops.drafting import continuation

_PER_MATCH = 2
"""Drafts at most for each token that matches. One has fewer rejected, but two more accepted; with
the cost of a row at 2 to 5 % of a step, two yields more in edits, quotations and JSON."""

_MAX_DEVICE_MATCH = 32
"""Tokens that a GPU compares at each place; a longer match says little more. Above MAX_DRAFTS."""

_TOKENS_AT_ONCE = 4096
"""Of a sequence in a step, some 8 ms: others wait for it. Longer prompts have drafts later."""


class SuffixDrafter:
    """Follows each sequence with a suffix automaton of its tokens.

    Args:
        min_match: shortest suffix to match.
        outputs: those of earlier requests, where a longer match than in the text itself counts;
            None for none.
    """

    def __init__(self, min_match: int, outputs: OutputCache | None = None) -> None:
        self._min_match = min_match
        self._outputs = outputs
        self.caches: list[KVCache] = []
        self.from_outputs: set[int] = set()
        self._texts: dict[int, _Text] = {}

    def propose(self, chunks: list[Chunk]) -> list[list[int]]:
        self.from_outputs.clear()
        return [
            self._drafts(chunk.sequence, chunk.num_drafts) if chunk.num_drafts else []
            for chunk in chunks
        ]

    def update(self, batch: Batch, arrays: BatchArrays, output: StepOutput) -> None:
        """Nothing to update: it reads the sequences."""

    def forget(self, sequence: Sequence) -> None:
        self._texts.pop(sequence.request_id, None)
        is_whole = sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        if self._outputs is not None and is_whole:
            self._outputs.add(sequence)

    def _drafts(self, sequence: Sequence, count: int) -> list[int]:
        text = self._texts.setdefault(sequence.request_id, _Text())
        if not text.follow(sequence.token_ids):
            return []
        if self._outputs is not None:
            text.cached.follow(
                sequence.token_ids, self._outputs.automata_of(sequence.request.cache_salt)
            )
            drafts = text.cached.drafts(
                count, _PER_MATCH, max(text.match.length, self._min_match - 1)
            )
            if drafts:
                self.from_outputs.add(sequence.request_id)
                return drafts
        if text.match.length < self._min_match:
            return []
        begin = text.automaton.first_end(text.match) + 1
        return continuation(
            text.automaton.tokens, begin, min(count, _PER_MATCH * text.match.length)
        )


class _Text:
    """The tokens of a sequence, their longest suffix that occurs earlier, and those in outputs."""

    def __init__(self) -> None:
        self.automaton = SuffixAutomaton()
        self.match = Match()
        self.cached = CachedMatches()

    def follow(self, token_ids: list[int]) -> bool:
        """Take in the new tokens, up to _TOKENS_AT_ONCE; returns whether these were all."""
        automaton, match = self.automaton, self.match
        first = len(automaton.tokens)
        for token in token_ids[first : first + _TOKENS_AT_ONCE]:
            automaton.advance(match, token)
            automaton.append(token)
        return len(automaton.tokens) == len(token_ids)


def _load(spec: DrafterSpec) -> SuffixDrafter:
    settings = spec.settings
    max_tokens = settings.suffix_decoding_max_cached_tokens
    return SuffixDrafter(
        settings.prompt_lookup_min, OutputCache(max_tokens) if max_tokens else None
    )


def _load_for_target(spec: DrafterSpec, target: Target) -> SuffixDrafter:
    return _load(spec)


def _load_on_device(spec: DrafterSpec, target: DeviceTarget) -> DeviceDrafter:
    from inflight.execution.drafters.device_search import DeviceSearch

    return DeviceSearch(_MAX_DEVICE_MATCH, spec.settings.prompt_lookup_min, per_match=_PER_MATCH)


METHOD = DraftMethod(
    load=_load_for_target,
    load_on_device=_load_on_device,
    needs_history=True,
    caches_outputs=True,
    load_on_host=_load,
)
