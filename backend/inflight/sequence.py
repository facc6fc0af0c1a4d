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

    Invariants: KV of tokens [0, num_computed) stands in `blocks`; a running sequence that decodes
    has num_computed == len(token_ids) - 1; `blocks[i]` holds tokens i*block_size and following.

    Attributes:
        token_ids: prompt, then output.
        num_computed: tokens whose KV is in the pool.
        blocks: the block table: ids into the pool.
        block_hashes: chained hashes of the full blocks of `token_ids`, as far as known.
        max_tokens: output tokens at most, after the engine's default and the context's clamp.
        seed: of its random draws: the request's, or one that the engine drew.
        eos_token_ids: tokens that end it: the model's and the request's end_id.
        bad_word_ids: token strings that must not appear in the output.
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
        "max_tokens",
        "num_cached_tokens",
        "num_computed",
        "num_preemptions",
        "request",
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
        self.max_tokens = max_tokens
        self.seed = seed
        self.eos_token_ids = eos_token_ids
        self.bad_word_ids = bad_word_ids
        self.token_ids: list[int] = list(request.prompt_ids)
        self.num_computed = 0
        self.blocks: list[int] = []
        self.block_hashes: list[bytes] = []
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.cumulative_logprob = 0.0

    @property
    def request_id(self) -> int:
        return self.request.request_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def num_uncomputed(self) -> int:
        """Tokens known but not yet in the KV cache: a prompt's rest, or 1 in decode."""
        return len(self.token_ids) - self.num_computed

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id}, {self.status.value}, "
            f"{self.num_prompt_tokens}+{self.num_output_tokens} tokens, "
            f"{self.num_computed} computed, {len(self.blocks)} blocks)"
        )
