"""How far the engine has come with one request."""

from __future__ import annotations

import enum

from inflight.request import FinishReason, Request


class Status(enum.Enum):
    WAITING = "waiting"  # queued: has no KV blocks
    RUNNING = "running"  # has blocks, takes part in steps
    SUSPENDED = "suspended"  # its consumer fell silent: no blocks, not queued
    FINISHED = "finished"


class Sequence:
    """A request's tokens and the KV blocks that hold them.

    A token is in flight from when a step that will choose it is scheduled until the host commits
    that step. Steps run in the order in which they are scheduled, so whatever is scheduled counts
    as computed for all that is scheduled later.

    Invariants: KV of tokens [0, num_computed) stands in `blocks` once the scheduled steps have run;
    a running sequence that decodes has num_computed == num_tokens - 1; `blocks[i]` holds tokens
    i*block_size and following.

    Attributes:
        request_id: the request's.
        num_prompt_tokens: tokens of its prompt.
        token_ids: prompt, then output, as far as the host knows it.
        num_in_flight: tokens that follow them and are in flight.
        num_computed: tokens whose KV is in the pool, or will be before a later step runs.
        generation: how often it has lost its blocks; a step scheduled before that is not its own.
        blocks: the block table: ids into the pool.
        block_hashes: chained hashes of the full blocks of `token_ids`, as far as known.
        max_tokens: output tokens at most, after the engine's default and the context's clamp.
        max_length: prompt and output together, at most.
        seed: of its random draws: the request's, or one that the engine drew.
        eos_token_ids: tokens that end it: the model's and the request's end_id.
        bad_word_ids: token strings that must not appear in the output.
        needs_host: the host must have seen all tokens before it can say what the next one may be:
            never more than one is in flight.
        num_cached_tokens: prompt tokens found in the prefix cache when first admitted.
        num_preemptions: how often its blocks were taken away.
        cumulative_logprob: sum over the output tokens.
    """

    __slots__ = (
        "bad_word_ids",
        "block_hashes",
        "blocks",
        "cumulative_logprob",
        "eos_token_ids",
        "finish_reason",
        "generation",
        "max_length",
        "max_tokens",
        "needs_host",
        "num_cached_tokens",
        "num_computed",
        "num_in_flight",
        "num_preemptions",
        "num_prompt_tokens",
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
    ) -> None:
        self.request = request
        self.request_id = request.request_id
        self.num_prompt_tokens = len(request.prompt_ids)
        self.max_tokens = max_tokens
        self.max_length = self.num_prompt_tokens + max_tokens
        self.seed = seed
        self.eos_token_ids = eos_token_ids
        self.bad_word_ids = bad_word_ids
        self.needs_host = any(len(word) > 1 for word in bad_word_ids)
        self.token_ids: list[int] = list(request.prompt_ids)
        self.num_in_flight = 0
        self.num_computed = 0
        self.generation = 0
        self.blocks: list[int] = []
        self.block_hashes: list[bytes] = []
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.cumulative_logprob = 0.0

    @property
    def num_tokens(self) -> int:
        """Prompt and output, with what is in flight."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def num_output_tokens(self) -> int:
        """Output tokens that the host knows."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        """Tokens that no step computes yet: a prompt's rest, or 1 in decode."""
        return self.num_tokens - self.num_computed

    def banned_tokens(self, num_output: int) -> list[int]:
        """Tokens that may not follow the first num_output output tokens.

        Those that would end the output before min_tokens, and those that would complete a bad word,
        all of whose other tokens end the output: the host must know these (see needs_host).
        """
        banned: list[int] = []
        for word in self.bad_word_ids:
            before = len(word) - 1
            if 0 <= before <= num_output:
                tail = self.token_ids[len(self.token_ids) - before :]
                if tail == list(word[:-1]):
                    banned.append(word[-1])
        if num_output < self.request.params.min_tokens:
            banned.extend(self.eos_token_ids)
        return banned

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id}, {self.status.value}, "
            f"{self.num_prompt_tokens}+{self.num_output_tokens} tokens, "
            f"{self.num_in_flight} in flight, "
            f"{self.num_computed} computed, {len(self.blocks)} blocks)"
        )
