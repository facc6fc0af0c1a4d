"""How far the engine has come with one request."""

from __future__ import annotations

import copy
import enum
from abc import ABC, abstractmethod

from inflight.core.output_grammar import OutputGrammar
from inflight.core.request import FinishReason, Request
from inflight.sampling.logit_adjustments import LogitAdjustments


class Status(enum.Enum):
    WAITING = "waiting"  # queued: has no KV blocks
    RUNNING = "running"  # has blocks, takes part in steps
    SUSPENDED = "suspended"  # its consumer fell silent: no blocks, not queued
    FINISHED = "finished"


class SequenceGroup(ABC):
    """What waits, runs, is preempted and ends as one: a sequence, or the beams of a search.

    Attributes:
        request: what was asked for.
        request_id: the request's.
        num_prompt_tokens: tokens of its prompt.
        width: sequences that it may run as: its slots in the batch.
        status: where it stands.
        finish_reason: why it ended; None as long as it has not, or has failed.
        cumulative_logprob: sum over the output tokens that are final.
        num_steps: committed steps that chose tokens for it.
        num_cached_tokens: prompt tokens found in the prefix cache when first admitted.
        num_preemptions: how often its blocks were taken away.
    """

    __slots__ = (
        "cumulative_logprob",
        "finish_reason",
        "num_cached_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_steps",
        "request",
        "request_id",
        "status",
        "width",
    )

    def __init__(self, request: Request) -> None:
        self.request = request
        self.request_id = request.request_id
        self.num_prompt_tokens = len(request.prompt_ids)
        self.width = request.params.beam_width
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.cumulative_logprob = 0.0
        self.num_steps = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0

    @property
    @abstractmethod
    def members(self) -> tuple[Sequence, ...]:
        """The sequences that hold blocks and are computed: `width` of them, or fewer."""

    @property
    @abstractmethod
    def num_output_tokens(self) -> int:
        """Output tokens that the host knows and that are final."""


class Sequence(SequenceGroup):
    """A request's tokens and the KV blocks that hold them; a group of one, unless it is a beam.

    The beams of a search are sequences of one length that share the blocks of what they have in
    common. Their group waits, runs and loses its blocks for them, and chooses their next tokens.

    A token is in flight from when a step that will choose it is scheduled until the host commits
    that step. Steps run in the order in which they are scheduled, so whatever is scheduled counts
    as computed for all that is scheduled later. Drafted tokens count as if they were right until
    their step is committed, and those that were not are taken back then.

    Invariants: KV of tokens [0, num_computed) stands in `blocks` once the scheduled steps have run;
    a running sequence that decodes has num_computed == num_tokens - 1; `blocks[i]` holds tokens
    i*block_size and following.

    Attributes:
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
        beam_of: the beam search whose beam it is; None if it is a group of its own.
        num_candidates: the top tokens that a runner has to report for each of its tokens; None for
            no token at all. Of a beam they are the top tokens among those that may be chosen.
        logit_adjustments: what the host says of the choice of its tokens.
        grammar: where its output stands in what it must match; None if it must match nothing.
        is_complete: nothing may follow the tokens that it has: its grammar says so.
        needs_committed_tokens: the host must have seen all tokens before it can say what the next
            one may be: never more than one is in flight.
        num_drafts: tokens to draft in each of its steps from now on.
        num_drafted: drafts that were verified so far.
        num_accepted: those of them that were accepted.
        num_scored: tokens of its prompt whose log-probabilities are committed, or not wanted. Until
            these are all, it has no output.
    """

    __slots__ = (
        "beam_of",
        "block_hashes",
        "blocks",
        "eos_token_ids",
        "generation",
        "grammar",
        "is_complete",
        "logit_adjustments",
        "max_length",
        "max_tokens",
        "needs_committed_tokens",
        "num_accepted",
        "num_candidates",
        "num_computed",
        "num_drafted",
        "num_drafts",
        "num_in_flight",
        "num_scored",
        "seed",
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
        super().__init__(request)
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
        self.beam_of: SequenceGroup | None = None
        self.num_candidates = request.params.num_logprobs
        self.grammar: OutputGrammar | None = None
        self.is_complete = False
        self.token_ids: list[int] = list(request.prompt_ids)
        self.num_in_flight = 0
        self.num_computed = 0
        self.generation = 0
        self.blocks: list[int] = []
        self.block_hashes: list[bytes] = []
        self.num_drafts = 0
        self.num_drafted = 0
        self.num_accepted = 0
        # Of a prompt that is scored the first token follows nothing.
        self.num_scored = (
            self.num_prompt_tokens if request.params.num_prompt_logprobs is None else 1
        )

    @property
    def group(self) -> SequenceGroup:
        """What it waits, runs and ends with."""
        return self if self.beam_of is None else self.beam_of

    @property
    def members(self) -> tuple[Sequence]:
        return (self,)

    @property
    def num_tokens(self) -> int:
        """Prompt and output, with what is in flight: at most, if drafts are."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def num_output_tokens(self) -> int:
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
