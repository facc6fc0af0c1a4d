"""Validates requests against an engine's limits.

Fronts are other processes, so the engine does not rely on their checks: constraints of a request by
itself are checked by its types (`core.request`, `sampling.params`), those of this engine's model,
pool and settings here. An accepted request can always be completed; the scheduler relies on that.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from inflight.core.output_constraint import GUIDE_FIELD
from inflight.core.request import Request, check_length
from inflight.core.sequence import Sequence
from inflight.engine.beam_search import num_candidates_needed
from inflight.engine.output import StopConditions, bad_word_ids
from inflight.errors import RequestError
from inflight.kv.layout import KVTables
from inflight.sampling.params import DRY_SEQUENCE_BREAKERS, MAX_LOGPROBS, WHOLE_CONTEXT
from inflight.text.detokenize import Detokenizer
from inflight.text.dry_breakers import DryBreakers
from inflight.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Capacity of the KV cache and of the batch.

    Attributes:
        num_blocks: KV blocks in the pool.
        kv_tables: the block tables of each sequence.
        max_num_seqs: maximum running sequences.
    """

    num_blocks: int
    kv_tables: KVTables
    max_num_seqs: int

    def check(self, sequence: Sequence) -> None:
        """Check that a request could run with the whole pool to itself.

        Raises:
            RequestError: it could not.
        """
        prompt, output = sequence.num_prompt_tokens, sequence.max_tokens
        if self.kv_tables.num_blocks(prompt + output) > self.num_blocks:
            limit = self.kv_tables.max_tokens(self.num_blocks)
            fits = (
                f"with this prompt, max_tokens of at most {limit - prompt} fits"
                if prompt < limit
                else f"a prompt of at most {limit - min(1, output)} fits"
            )
            raise RequestError(
                f"a prompt of {prompt} tokens and max_tokens of {output} need {prompt + output} "
                f"tokens of KV cache; the whole cache has {limit}: {fits}"
            )
        if sequence.width > 1:
            self._check_beams(sequence)

    def clipped_max_tokens(self, wanted: int, num_prompt_tokens: int, width: int) -> int:
        """A number of output tokens, limited to the capacity of a small pool."""
        limit = self._max_beam_tokens(self._num_shared_blocks(num_prompt_tokens), width)
        return max(1, min(wanted, limit - num_prompt_tokens))

    def _num_shared_blocks(self, num_prompt_tokens: int) -> int:
        """Blocks of a prompt that all beams share, at least: those of all tables that are full."""
        unit = max(self.kv_tables.spans)
        return self.kv_tables.num_blocks(num_prompt_tokens // unit * unit)

    def _max_beam_tokens(self, num_shared: int, width: int) -> int:
        """Tokens of each beam, at most, if the beams share so many blocks."""
        return self.kv_tables.max_tokens(num_shared + (self.num_blocks - num_shared) // width)

    def _check_beams(self, sequence: Sequence) -> None:
        width = sequence.width
        if width > self.max_num_seqs:
            raise RequestError(
                f"{width} beams run as {width} sequences; allowed: up to max_num_seqs, "
                f"{self.max_num_seqs}",
                "beam_width",
            )
        # In the worst case they share only the full blocks of their prompt.
        prompt, num_blocks = sequence.num_prompt_tokens, self.num_blocks
        shared = self._num_shared_blocks(prompt)
        needed = shared + width * (self.kv_tables.num_blocks(sequence.max_length - 1) - shared)
        if needed > num_blocks:
            most = self._max_beam_tokens(shared, width) - prompt + 1
            raise RequestError(
                f"{width} beams, a prompt of {prompt} tokens and max_tokens of "
                f"{sequence.max_tokens} need {needed} blocks of KV cache, and the whole cache has "
                f"{num_blocks}; allowed: "
                + (f"max_tokens of at most {most}, or fewer beams" if most > 0 else "fewer beams"),
                "beam_width",
            )


def _extremes(prompt_ids: list[int]) -> tuple[int, int]:
    """The smallest and the largest id of a prompt.

    No step is launched meanwhile: for 100,000 ids, `min` and `max` of Python take 1.7 ms, this 0.4.
    """
    try:
        ids = np.frombuffer(array("I", prompt_ids), np.uintc)
    except OverflowError:  # one is negative, or far too large
        return min(prompt_ids), max(prompt_ids)
    return int(ids.min()), int(ids.max())


class Admission:
    """Validates requests and creates their sequences.

    Args:
        pool: the capacity.
        vocab_size: token ids are below it.
        max_model_len: maximum tokens of prompt and output.
        default_max_tokens: maximum output tokens of a request that does not set it.
        eos_token_ids: the model's own end-of-sequence tokens.
        tokenizer: the model's; None if it takes token ids only.
        detokenizer: of that tokenizer.
    """

    def __init__(
        self,
        pool: PoolLimits,
        vocab_size: int,
        max_model_len: int,
        default_max_tokens: int,
        eos_token_ids: Iterable[int],
        tokenizer: Tokenizer | None = None,
        detokenizer: Detokenizer | None = None,
    ) -> None:
        self.eos_token_ids = frozenset(eos_token_ids)
        self._pool = pool
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._default_max_tokens = default_max_tokens
        self._tokenizer = tokenizer
        self._detokenizer = detokenizer
        self._breakers: DryBreakers | None = None
        if tokenizer is not None and detokenizer is not None:
            self._breakers = DryBreakers(tokenizer, detokenizer)

    def sequence(self, request: Request) -> Sequence:
        """A request's sequence.

        Raises:
            RequestError: it can never be served; the message states what is allowed.
        """
        self._check_prompt(request)
        request.params.check_vocabulary(self._vocab_size)
        self._check_tokenizer(request)
        params = request.params
        end_ids = () if params.end_id is None else (params.end_id,)
        sequence = Sequence(
            request,
            max_tokens=self._max_tokens(request),
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            eos_token_ids=self.eos_token_ids.union(end_ids, params.stop_token_ids),
            bad_word_ids=(
                bad_word_ids(self._tokenizer, params.bad_words) if self._tokenizer else ()
            ),
            breaker_ids=self._breaker_ids(request),
        )
        self._check_outputs(sequence)
        self._check_constraint(request)
        self._pool.check(sequence)
        return sequence

    def _check_prompt(self, request: Request) -> None:
        prompt_ids = request.prompt_ids
        if not prompt_ids:
            raise RequestError("the prompt has no tokens; allowed: at least 1", "input_ids")
        low, high = _extremes(prompt_ids)
        if low < 0 or high >= self._vocab_size:
            raise RequestError(
                f"token id {low if low < 0 else high} is not in the vocabulary; "
                f"allowed: 0 to {self._vocab_size - 1}",
                "input_ids",
            )
        check_length(len(prompt_ids), request.params.max_tokens, self._max_model_len, "input_ids")

    def _check_tokenizer(self, request: Request) -> None:
        """Reject text options if there is no tokenizer."""
        if self._tokenizer is not None:
            return
        for name in ("stop_words", "bad_words", "dry_sequence_breakers"):
            if getattr(request.params, name):
                raise RequestError("this model has no tokenizer and takes token ids only", name)

    def _check_outputs(self, sequence: Sequence) -> None:
        """Reject options incompatible with beam search, and too many beams for the candidates."""
        request, width = sequence.request, sequence.width
        output_ids = request.output_ids
        if output_ids and (output_ids[0] != request.request_id or len(set(output_ids)) > width):
            raise RequestError(
                f"{len(output_ids)} outputs of {width} beams; allowed: up to beam_width, the first "
                "under the request's own id",
                "output_ids",
            )
        if width == 1:
            return
        if request.structured is not None:
            raise RequestError(
                f"cannot be combined with beam_width {width}: a grammar follows one output",
                GUIDE_FIELD,
            )
        if request.acknowledged:
            raise RequestError(
                "delivery cannot be acknowledged before the end, when the best outputs are known",
                "beam_width",
            )
        stop_conditions = StopConditions(sequence, self._detokenizer)
        most = min(MAX_LOGPROBS, self._vocab_size)
        if num_candidates_needed(width, stop_conditions) > most:
            num_ids = stop_conditions.num_ids
            raise RequestError(
                f"{width} beams and {num_ids} tokens that end them exceed the {most} candidates of "
                f"a step; allowed: up to {most - num_ids}",
                "beam_width",
            )

    def _check_constraint(self, request: Request) -> None:
        """Reject a grammar that cannot be used, or that contradicts another option."""
        if request.structured is None:
            return
        if self._tokenizer is None:
            raise RequestError("this model has no tokenizer and takes token ids only", GUIDE_FIELD)
        if request.params.ignore_eos:
            raise RequestError(
                "cannot be combined with a grammar, which determines the end", "ignore_eos"
            )

    def _max_tokens(self, request: Request) -> int:
        """Maximum output tokens: the request's or the default, limited by the context.

        Raises:
            RequestError: the context is too small for min_tokens.
        """
        params, num_prompt_tokens = request.params, len(request.prompt_ids)
        wanted = params.max_tokens
        possible = self._max_model_len - num_prompt_tokens
        if wanted is None or wanted == WHOLE_CONTEXT:
            # These are limited to the capacity of a small pool; an explicit number is rejected.
            wanted = self._pool.clipped_max_tokens(
                max(self._default_max_tokens, params.min_tokens) if wanted is None else possible,
                num_prompt_tokens,
                params.beam_width,
            )
        if params.min_tokens > possible:
            raise RequestError(
                f"{params.min_tokens} do not fit the context of {self._max_model_len} tokens with "
                f"a prompt of {num_prompt_tokens}; allowed: up to {possible}",
                "min_tokens",
            )
        return min(wanted, possible)

    def _breaker_ids(self, request: Request) -> frozenset[int]:
        """DRY's sequence breakers."""
        params = request.params
        if self._breakers is None or not params.has_dry:
            return frozenset()
        wanted = params.dry_sequence_breakers
        return self._breakers.ids(DRY_SEQUENCE_BREAKERS if wanted is None else wanted)
