"""Beam search: approximates the most probable continuations of a prompt with a bounded width.

Each step expands all beams by one token and keeps the `beam_width` most probable continuations: a
beam may be continued several times, or dropped. Finished beams are ranked by
logprob / length ** length_penalty. Semantics are those of
`generate(num_beams=beam_width, num_return_sequences=n)` in Transformers 5; the method is Lowerre's
(The HARPY speech recognition system, 1976).
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
    """State of a beam besides its tokens.

    Attributes:
        stop_conditions: of its output.
        candidates: num_logprobs top logprobs of each of its tokens; [] if not requested.
    """

    stop_conditions: StopConditions
    candidates: list[list[Candidate]]


@dataclass(frozen=True, slots=True)
class _FinishedBeam:
    """A finished output.

    Attributes:
        score: for ranking.
        logprob: cumulative.
        token_ids: prompt and output.
        candidates: see `_BeamState`.
    """

    score: float
    logprob: float
    token_ids: list[int]
    candidates: list[list[Candidate]]


class BeamGroup(SequenceGroup):
    """The beams of one request, scheduled as a group.

    Args:
        first: the request's sequence: the only beam until the prompt is computed.
        stop_conditions: of its outputs.
        vocab_size: of the model.

    Attributes:
        is_finished: no live beam is left.
    """

    __slots__ = ("_blank", "_ended", "_members", "_params", "_states", "is_finished")

    def __init__(self, first: Sequence, stop_conditions: StopConditions, vocab_size: int) -> None:
        super().__init__(first.request)
        params = first.request.params
        self.is_finished = False
        self._params = params
        self._blank = first.fork(first.request_id)  # forked for each output
        self._ended: list[_FinishedBeam] = []  # best first
        first.beam_of = self
        first.needs_committed_tokens = True
        # Stop strings may end a beam too, so take more if possible.
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
        """0: the output tokens are known only at the end."""
        return 0

    def advance(self, committed: Iterable[Committed], scheduler: Scheduler) -> list[Sequence]:
        """Select the continuations of the beams.

        Args:
            committed: the candidates for the next tokens of all of them.
            scheduler: of the beams.

        Returns:
            The dropped beams, whose blocks have been released.
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
        # Stable: ties go to the earlier beam, then to the better rank.
        continuations.sort(key=lambda way: -way[0])
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
        """The finished outputs, the best first, for `OutputStage.collect`."""
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
        """Add a finished beam; keep it if it is among the best."""
        score = logprob / length**self._params.length_penalty
        self._ended.append(_FinishedBeam(score, logprob, token_ids, known))
        self._ended.sort(key=lambda one: -one.score)
        del self._ended[self._params.beam_width :]

    def _is_done(self, best: float, length: int) -> bool:
        """Whether the search is done.

        Args:
            best: cumulative logprob of the best live beam; -inf if there is none.
            length: its output tokens.
        """
        if best == -math.inf:
            return True
        if len(self._ended) < self._params.beam_width:
            return False
        # A longer beam may score better; like Transformers, assume its current score.
        attainable = best / length**self._params.length_penalty
        return self._params.early_stopping or attainable <= self._ended[-1].score

    def _candidates(
        self, beam: Sequence, chosen: Candidate, ranked: list[Candidate]
    ) -> list[list[Candidate]]:
        """The reported candidates of a beam's tokens, extended by one token."""
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
        """Add an accepted search."""
        self._groups[group] = group

    def forget(self, group: SequenceGroup) -> None:
        """Drop a finished request; idempotent."""
        self._groups.pop(group, None)

    def split(
        self, committed: list[Committed]
    ) -> tuple[list[Committed], dict[BeamGroup, list[Committed]]]:
        """Split a step's results into those of ordinary sequences, and those of beams by search."""
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
    """Number of candidates of one beam that suffices for all continuations, end tokens included."""
    return beam_width + stop_conditions.num_ids


def _by_rank(candidates: list[list[Candidate]]) -> list[Candidate]:
    """The continuations of a beam, most probable first."""
    found = candidates[0] if candidates else []
    return sorted(found, key=lambda candidate: candidate.rank)
