"""How far the engine has come with one request."""

from __future__ import annotations

import copy
import enum
from typing import TYPE_CHECKING

from inflight.core.request import Candidate, FinishReason, Request
from inflight.sampling.logit_adjustments import LogitAdjustments

if TYPE_CHECKING:  # llguidance is loaded with the first request that needs it
    from inflight.structured.grammar_state import GrammarState


class Status(enum.Enum):
    WAITING = "waiting"  # queued: has no KV blocks
    RUNNING = "running"  # has blocks, takes part in steps
    SUSPENDED = "suspended"  # its consumer fell silent: no blocks, not queued
    FINISHED = "finished"


class Sequence:
    """A request's tokens and the KV blocks that hold them.

    A beam search is a sequence, its head, that computes nothing itself and has no blocks. It stands
    for its beams wherever they wait their turn: they run, lose their blocks and end together. They
    are sequences of one length that share the blocks of what they have in common.

    A token is in flight from when a step that will choose it is scheduled until the host commits
    that step. Steps run in the order in which they are scheduled, so whatever is scheduled counts
    as computed for all that is scheduled later. Drafted tokens count as if they were right until
    their step is committed, and those that were not are taken back then.

    Invariants: KV of tokens [0, num_computed) stands in `blocks` once the scheduled steps have run;
    a running sequence that decodes has num_computed == num_tokens - 1; `blocks[i]` holds tokens
    i*block_size and following.

    Attributes:
        request_id: the request's.
        num_prompt_tokens: tokens of its prompt.
        token_ids: prompt, then output, as far as the host knows it.
        num_in_flight: tokens that follow them and are in flight, at most.
        num_computed: tokens whose KV is in the pool, or will be before a later step runs.
        generation: how often it has lost its blocks; a step scheduled before that is not its own.
        blocks: the block table: ids into the pool.
        block_hashes: chained hashes of the full blocks of `token_ids`, as far as known.
        max_tokens: output tokens at most, after the engine's default and the context's clamp.
        max_length: prompt and output together, at most.
        seed: of its random draws: the request's, or one that the engine drew.
        eos_token_ids: tokens that end it: the model's and the request's end_id.
        beams: of a beam search, the outputs that are followed; None of any other sequence.
        head: the beam search whose beam it is; None if it is none.
        num_batch_slots: places in the batch that it takes: one for each beam.
        num_candidates: the likeliest tokens that a runner has to name for each of its tokens; None
            for no token at all. Of a beam they are the likeliest of those that may be chosen.
        logit_adjustments: what the host says of the choice of its tokens.
        grammar: where its output stands in what it must match; None if it must match nothing.
        is_complete: nothing may follow the tokens that it has: its grammar says so.
        needs_committed_tokens: the host must have seen all tokens before it can say what the next
            one may be: never more than one is in flight.
        num_drafts: tokens to draft in each of its steps from now on.
        num_drafted: drafts that were looked at so far.
        num_accepted: those of them that were right.
        num_steps: committed steps that chose tokens for it.
        num_cached_tokens: prompt tokens found in the prefix cache when first admitted.
        num_preemptions: how often its blocks were taken away.
        cumulative_logprob: sum over the output tokens.
        last_logprobs: of the tokens that the last commit appended.
        last_candidates: of these tokens, what num_candidates asks for; empty if it asks for
            nothing. Of a beam, of the token that is to be chosen next.
        num_scored: tokens of its prompt whose log-probabilities are committed, or not wanted. Until
            these are all, it has no output.
        prompt_candidates: what no event has told yet of these tokens.
    """

    __slots__ = (
        "beams",
        "block_hashes",
        "blocks",
        "cumulative_logprob",
        "eos_token_ids",
        "finish_reason",
        "generation",
        "grammar",
        "head",
        "is_complete",
        "last_candidates",
        "last_logprobs",
        "logit_adjustments",
        "max_length",
        "max_tokens",
        "needs_committed_tokens",
        "num_accepted",
        "num_batch_slots",
        "num_cached_tokens",
        "num_candidates",
        "num_computed",
        "num_drafted",
        "num_drafts",
        "num_in_flight",
        "num_preemptions",
        "num_prompt_tokens",
        "num_scored",
        "num_steps",
        "prompt_candidates",
        "request",
        "request_id",
        "seed",
        "status",
        "token_ids",
    )

    def __init__(
        self,
        request: Request,
        max_tokens: int,
        seed: int = 0,
        eos_token_ids: frozenset[int] = frozenset(),
        bad_word_ids: tuple[tuple[int, ...], ...] = (),
        breaker_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.request = request
        self.request_id = request.request_id
        self.num_prompt_tokens = len(request.prompt_ids)
        self.max_tokens = max_tokens
        self.max_length = self.num_prompt_tokens + max_tokens
        self.seed = seed
        self.eos_token_ids = eos_token_ids
        self.logit_adjustments = LogitAdjustments(
            request.params, self.num_prompt_tokens, eos_token_ids, bad_word_ids, breaker_ids
        )
        self.needs_committed_tokens = (
            self.logit_adjustments.needs_committed_tokens or request.structured is not None
        )
        self.beams: list[Sequence] | None = None
        self.head: Sequence | None = None
        self.num_batch_slots = request.params.beam_width
        self.num_candidates = request.params.num_logprobs
        self.grammar: GrammarState | None = None
        self.is_complete = False
        self.token_ids: list[int] = list(request.prompt_ids)
        self.num_in_flight = 0
        self.num_computed = 0
        self.generation = 0
        self.blocks: list[int] = []
        self.block_hashes: list[bytes] = []
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.num_drafts = 0
        self.num_drafted = 0
        self.num_accepted = 0
        self.num_steps = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.cumulative_logprob = 0.0
        self.last_logprobs: list[float] = []
        self.last_candidates: list[list[Candidate]] = []
        self.num_scored = self.num_prompt_tokens
        self.prompt_candidates: list[list[Candidate]] = []
        if request.params.num_prompt_logprobs is not None:
            self.num_scored = 1  # the first token follows nothing
            self.prompt_candidates.append([])

    @property
    def num_tokens(self) -> int:
        """Prompt and output, with what is in flight: at most, if drafts are."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def num_output_tokens(self) -> int:
        """Output tokens that the host knows."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        """Tokens that no step computes yet: a prompt's rest, or 1 in decode."""
        return self.num_tokens - self.num_computed

    def fork(self, request_id: int) -> Sequence:
        """A sequence of the same request and tokens that may go on otherwise, with the same blocks:
        its owner has to count them."""
        other = copy.copy(self)
        other.request_id = request_id
        other.logit_adjustments = self.logit_adjustments.fork()
        other.token_ids = self.token_ids.copy()
        other.blocks = self.blocks.copy()
        other.block_hashes = self.block_hashes.copy()
        return other

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id}, {self.status.value}, "
            f"{self.num_prompt_tokens}+{self.num_output_tokens} tokens, "
            f"{self.num_in_flight} in flight, "
            f"{self.num_computed} computed, {len(self.blocks)} blocks)"
        )
