"""Beam search: of all continuations of a prompt, the likeliest that a bounded look finds.

Each step looks at what may follow each of `beam_width` beams and goes on with as many of the
likeliest: a beam may go on in several continuations, or in none. Those that have ended are ranked
    by their
log-probability / length ** length_penalty. Semantics are those of `generate(num_beams=beam_width,
num_return_sequences=n)` in Transformers 5; the method is Lowerre's (The HARPY speech recognition
system, 1976).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from inflight.core.batch import Committed
from inflight.core.request import Candidate
from inflight.core.sequence import Sequence, SequenceGroup
from inflight.engine.output import StopConditions
from inflight.sampling.params import MAX_LOGPROBS
from inflight.scheduling.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class _BeamState:
    """What is known of a beam beside its tokens.

    Attributes:
        stop_conditions: what ends it.
        candidates: of each of its tokens, what num_logprobs asks for; [] if it asks for nothing.
    """

    stop_conditions: StopConditions
    candidates: list[list[Candidate]]


@dataclass(frozen=True, slots=True)
class _FinishedBeam:
    """An output.

    Attributes:
        score: what it is ranked by.
        logprob: of all its tokens together.
        token_ids: prompt and output.
        candidates: see `_BeamState`.
    """

    score: float
    logprob: float
    token_ids: list[int]
    candidates: list[list[Candidate]]


class BeamGroup(SequenceGroup):
    """The beams of one request, which wait, run and choose together.

    Args:
        first: the request's sequence: the one beam as long as there is nothing but the prompt.
        stop_conditions: of its outputs.
        vocab_size: of the model.

    Attributes:
        is_finished: no beam goes on.
    """

    __slots__ = ("_blank", "_ended", "_members", "_params", "_states", "is_finished")

    def __init__(self, first: Sequence, stop_conditions: StopConditions, vocab_size: int) -> None:
        super().__init__(first.request)
        params = first.request.params
        self.is_finished = False
        self._params = params
        self._blank = first.fork(first.request_id)  # what an output is made of
        self._ended: list[_FinishedBeam] = []  # best first
        first.beam_of = self
        first.needs_committed_tokens = True
        # Strings may end a beam, too, so there is more where there is room.
        most = min(MAX_LOGPROBS, vocab_size)
        enough = num_candidates_needed(params.beam_width, stop_conditions)
        first.num_candidates = max(
            min(2 * params.beam_width, most), enough, params.num_logprobs or 0
        )
        self._members: tuple[Sequence, ...] = (first,)
        self._states = {first: _BeamState(stop_conditions, [])}

    @property
    def members(self) -> tuple[Sequence, ...]:
        return self._members

    @property
    def num_output_tokens(self) -> int:
        """0: which tokens are an output is known at the end."""
        return 0

    def advance(self, committed: Iterable[Committed], scheduler: Scheduler) -> list[Sequence]:
        """Choose how the beams go on.

        Args:
            committed: the candidates for the next tokens of all of them.
            scheduler: of these.

        Returns:
            The beams that do not go on, whose blocks are free.
        """
        beams = self._members
        ranked = {each.sequence: _by_rank(each.candidates) for each in committed}
        self.num_steps += 1
        length = beams[0].num_output_tokens + 1
        width = self._params.beam_width
        continuations = [
            (beam.cumulative_logprob + candidate.logprob, beam, candidate)
            for beam in beams
            for candidate in ranked[beam]
            if candidate.logprob > -math.inf
        ]
        continuations.sort(
            key=lambda way: -way[0]
        )  # stable: of equals, the earlier beam's likelier token
        chosen: list[tuple[float, Sequence, Candidate, _BeamState]] = []
        for place, (logprob, beam, candidate) in enumerate(continuations):
            if place >= width and len(chosen) == width:
                break
            conditions = self._states[beam].stop_conditions.after(candidate.token_id)
            if conditions is None:
                if place < width:
                    known = self._candidates(beam, candidate, ranked[beam])
                    self._end(logprob, [*beam.token_ids, candidate.token_id], known, length)
            elif len(chosen) < width:
                known = self._candidates(beam, candidate, ranked[beam])
                chosen.append((logprob, beam, candidate, _BeamState(conditions, known)))
        best = chosen[0][0] if chosen else -math.inf
        self.is_finished = self._is_done(best, length)
        if self.is_finished:
            return []
        after = scheduler.branch(
            beams,
            [(beam, candidate.token_id, candidate.logprob) for _, beam, candidate, _ in chosen],
        )
        self._members = tuple(after)
        self._states = {beam: way[3] for beam, way in zip(after, chosen, strict=True)}
        return [beam for beam in beams if beam not in self._states]

    def results(self) -> list[Committed]:
        """The best outputs that have ended, the best first, for `OutputStage.collect`."""
        found = []
        output_ids = self.request.output_ids or (self.request_id,)
        for output_id, ended in zip(output_ids, self._ended, strict=False):
            one = self._blank.fork(output_id)
            one.token_ids = ended.token_ids
            one.cumulative_logprob = ended.logprob
            one.num_steps = self.num_steps
            one.num_cached_tokens = self.num_cached_tokens
            new = ended.token_ids[self.num_prompt_tokens :]
            found.append(Committed(one, new, [], ended.candidates))
        return found

    def _end(
        self, logprob: float, token_ids: list[int], known: list[list[Candidate]], length: int
    ) -> None:
        """A beam has ended: keep it if it is among the best."""
        score = logprob / length**self._params.length_penalty
        self._ended.append(_FinishedBeam(score, logprob, token_ids, known))
        self._ended.sort(key=lambda one: -one.score)
        del self._ended[self._params.beam_width :]

    def _is_done(self, best: float, length: int) -> bool:
        """Whether no beam goes on.

        Args:
            best: log-probability of the likeliest beam that could; -inf if there is none.
            length: its tokens.
        """
        if best == -math.inf:
            return True
        if len(self._ended) < self._params.beam_width:
            return False
        # It may get better with more tokens; that it stays as it is, is the usual guess.
        hope = best / length**self._params.length_penalty
        return self._params.early_stopping or hope <= self._ended[-1].score

    def _candidates(
        self, beam: Sequence, chosen: Candidate, ranked: list[Candidate]
    ) -> list[list[Candidate]]:
        """What is to be reported of a beam's tokens with one more of them."""
        number = self._params.num_logprobs
        if number is None:
            return []
        others = [one for one in ranked[:number] if one is not chosen]
        return [*self._states[beam].candidates, [chosen, *others]]


class BeamSearches:
    """The beam searches that an engine has accepted and that have not ended."""

    def __init__(self) -> None:
        self._groups: dict[SequenceGroup, BeamGroup] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, group: BeamGroup) -> None:
        """A search was accepted."""
        self._groups[group] = group

    def forget(self, group: SequenceGroup) -> None:
        """A request has ended; idempotent."""
        self._groups.pop(group, None)

    def split(
        self, committed: list[Committed]
    ) -> tuple[list[Committed], dict[BeamGroup, list[Committed]]]:
        """What a step did for sequences that are no beams, and by search what it did for beams."""
        searches: dict[BeamGroup, list[Committed]] = {}
        if not self._groups:
            return committed, searches
        others = []
        for each in committed:
            group = each.sequence.beam_of
            if group is None:
                others.append(each)
            else:
                searches.setdefault(self._groups[group], []).append(each)
        return others, searches


def num_candidates_needed(beam_width: int, stop_conditions: StopConditions) -> int:
    """Candidates by which one beam can go on in all continuations: each but those that end it."""
    return beam_width + stop_conditions.num_ids


def _by_rank(candidates: list[list[Candidate]]) -> list[Candidate]:
    """What may follow a beam, the most likely token first."""
    found = candidates[0] if candidates else []
    return sorted(found, key=lambda candidate: candidate.rank)
