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
from dataclasses import dataclass

from inflight.core.request import Candidate
from inflight.core.sequence import Sequence
from inflight.engine.output import OutputStage, StopConditions
from inflight.errors import RequestError
from inflight.sampling.params import MAX_LOGPROBS
from inflight.scheduling.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class _BeamState:
    """What is known of a beam beside its tokens.

    Attributes:
        ends: what ends it.
        candidates: of each of its tokens, what num_logprobs asks for; [] if it asks for nothing.
    """

    ends: StopConditions
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


class BeamGroup:
    """The beams of one request, which wait, run and choose together.

    Args:
        head: the request's sequence; from now on it stands for its beams, of which there is one as
            long as they have nothing but the prompt.
        outputs: says what ends an output.
        vocab_size: of the model.

    Attributes:
        is_finished: no beam goes on.

    Raises:
        RequestError: so many beams cannot be told apart by as many candidates as there are, or have
            more first tokens than the vocabulary.
    """

    def __init__(self, head: Sequence, outputs: OutputStage, vocab_size: int) -> None:
        params = head.request.params
        ends = outputs.stop_conditions_of(head)
        width = params.beam_width
        # Of one beam that goes on in all continuations, each but those that end it.
        enough = width + ends.num_ids
        most = min(MAX_LOGPROBS, vocab_size)
        if enough > most:
            raise RequestError(
                f"{width} beams and {ends.num_ids} tokens that end them are more than the "
                f"{most} likeliest tokens that are looked at; allowed: up to {most - ends.num_ids}",
                "beam_width",
            )
        self.head = head
        self.is_finished = False
        self._params = params
        self._ended: list[_FinishedBeam] = []  # best first
        first = head.fork(head.request_id)
        first.head = head
        first.needs_committed_tokens = True
        # Strings may end a beam, too, so there is more where there is room.
        first.num_candidates = max(min(2 * width, most), enough, params.num_logprobs or 0)
        head.beams = [first]
        self._states = {first: _BeamState(ends, [])}

    def advance(self, scheduler: Scheduler) -> list[Sequence]:
        """Choose how the beams go on, all of which have the candidates for their next tokens.

        Returns:
            The beams that do not, whose blocks are free.
        """
        beams = list(self._states)
        self.head.num_steps += 1
        length = beams[0].num_output_tokens + 1
        width = self._params.beam_width
        continuations = [
            (beam.cumulative_logprob + candidate.logprob, beam, candidate)
            for beam in beams
            for candidate in _by_rank(beam)
            if candidate.logprob > -math.inf
        ]
        continuations.sort(
            key=lambda way: -way[0]
        )  # stable: of equals, the earlier beam's likelier token
        chosen: list[tuple[float, Sequence, Candidate, _BeamState]] = []
        for place, (logprob, beam, candidate) in enumerate(continuations):
            if place >= width and len(chosen) == width:
                break
            path = self._states[beam]
            ends = path.ends.after(candidate.token_id)
            if ends is None:
                if place < width:
                    self._end(logprob, beam, candidate, length)
            elif len(chosen) < width:
                known = self._candidates(beam, candidate)
                chosen.append((logprob, beam, candidate, _BeamState(ends, known)))
        best = chosen[0][0] if chosen else -math.inf
        self.is_finished = self._is_done(best, length)
        if self.is_finished:
            return []
        after = scheduler.branch(
            self.head,
            [(beam, candidate.token_id, candidate.logprob) for _, beam, candidate, _ in chosen],
        )
        self._states = {beam: way[3] for beam, way in zip(after, chosen, strict=True)}
        return [beam for beam in beams if beam not in self._states]

    def results(self) -> list[Sequence]:
        """The best outputs that have ended, the best first, for `OutputStage.collect`."""
        head = self.head
        found = []
        output_ids = head.request.output_ids or (head.request_id,)
        for output_id, ended in zip(output_ids, self._ended, strict=False):
            one = head.fork(output_id)
            one.beams = None
            one.token_ids = ended.token_ids
            one.cumulative_logprob = ended.logprob
            one.last_candidates = ended.candidates
            found.append(one)
        return found

    def _end(self, logprob: float, beam: Sequence, candidate: Candidate, length: int) -> None:
        """A beam has ended with a candidate: keep it if it is among the best."""
        ended = _FinishedBeam(
            logprob / length**self._params.length_penalty,
            logprob,
            [*beam.token_ids, candidate.token_id],
            self._candidates(beam, candidate),
        )
        self._ended.append(ended)
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

    def _candidates(self, beam: Sequence, chosen: Candidate) -> list[list[Candidate]]:
        """What is to be reported of a beam's tokens with one more of them."""
        number = self._params.num_logprobs
        if number is None:
            return []
        others = [one for one in _by_rank(beam)[:number] if one is not chosen]
        return [*self._states[beam].candidates, [chosen, *others]]


def _by_rank(beam: Sequence) -> list[Candidate]:
    """What may follow a beam, the likeliest first."""
    found = beam.last_candidates[0] if beam.last_candidates else []
    return sorted(found, key=lambda candidate: candidate.rank)
