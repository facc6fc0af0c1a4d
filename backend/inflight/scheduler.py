"""Which tokens are computed next, and in which KV blocks they go.

Continuous batching at the granularity of tokens (Orca, OSDI 2022) over a paged KV cache (vLLM,
SOSP 2023), prompts cut into chunks that ride along with decode steps (Sarathi-Serve, OSDI 2024).
The scheduler counts tokens and never looks at one. It knows no device and no text.

    add -> WAITING --schedule--> RUNNING --finish--> FINISHED
              ^  ^--preemption-----'  |
              '---resume--- SUSPENDED <--suspend

Why it cannot get stuck: no request is accepted that does not fit into the whole pool. Sequences
run in order of admission, and who needs a block takes it from the last admitted, himself at worst.
So the first of the running sequences always advances; when it has finished, the next is the first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from inflight.batch import Batch, Chunk, StepOutput
from inflight.blocks import BlockPool, block_hash, root_hash
from inflight.errors import CapacityError, EngineError, RequestError
from inflight.sequence import Sequence, Status


class Scheduler:
    """Plans steps and owns the KV blocks. One thread calls it.

    Each batch from `schedule` must be computed and handed to `commit` before the next one is made,
    or its sequences must be finished: the copies of a batch are asked for once.

    Args:
        num_blocks: KV blocks in the pool.
        block_size: tokens per block.
        max_num_seqs: sequences that run at once.
        max_batch_tokens: tokens in one step; no more sequences than that run at once.
        max_prefill_chunk: tokens of one prompt in one step; None for the whole budget.
        max_waiting: requests that may queue.
        prefix_cache: reuse blocks of equal prefixes.

    Attributes:
        num_preemptions: how often a running sequence lost its blocks to an older one.
        num_prompt_tokens: tokens in the prompts admitted so far.
        num_cached_tokens: those of them that came from the prefix cache.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_batch_tokens: int,
        max_prefill_chunk: int | None = None,
        max_waiting: int = 1024,
        prefix_cache: bool = True,
    ) -> None:
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self._pool = BlockPool(num_blocks, block_size)
        self._max_batch_tokens = max_batch_tokens
        self._max_num_seqs = max_num_seqs
        self._max_chunk = max_prefill_chunk or max_batch_tokens
        self._max_waiting = max_waiting
        self._prefix_cache = prefix_cache
        self._waiting: OrderedDict[int, Sequence] = OrderedDict()
        self._running: OrderedDict[int, Sequence] = OrderedDict()  # in order of admission
        self._suspended: dict[int, Sequence] = {}
        self._admitted: set[int] = set()  # known requests that have run before

    @property
    def waiting(self) -> Collection[Sequence]:
        """Live view, next to be admitted first."""
        return self._waiting.values()

    @property
    def running(self) -> Collection[Sequence]:
        """Live view, first admitted first."""
        return self._running.values()

    @property
    def suspended(self) -> Collection[Sequence]:
        """Live view, first suspended first."""
        return self._suspended.values()

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence owns; some of them may hold cached prefixes."""
        return self._pool.num_free

    def add(self, sequence: Sequence) -> None:
        """Queue a new request.

        Raises:
            RequestError: it could not run even with the whole pool to itself.
            CapacityError: the queue is full.
        """
        prompt, output = sequence.num_prompt_tokens, sequence.max_tokens
        limit = self._pool.num_blocks * self._pool.block_size
        if prompt < 1:
            raise RequestError("the prompt has no tokens; allowed: at least 1", "input_ids")
        if prompt + output > limit:
            fits = (
                f"with this prompt, max_tokens of at most {limit - prompt} fits"
                if prompt < limit
                else f"a prompt of at most {limit - 1} fits"
            )
            raise RequestError(
                f"a prompt of {prompt} tokens and max_tokens of {output} need {prompt + output} "
                f"tokens of KV cache, and the whole cache has {limit}: {fits}"
            )
        if len(self._waiting) >= self._max_waiting:
            raise CapacityError(
                f"{len(self._waiting)} requests are waiting (max_waiting is {self._max_waiting}); "
                "try again later"
            )
        sequence.status = Status.WAITING
        self._waiting[sequence.request_id] = sequence

    def schedule(self) -> Batch:
        """Plan one step: running sequences first, then new ones as long as there is room.

        Each running sequence that decodes gets its token. Prompts share the rest of the budget:
        in order of admission each takes half of what is left, so that a long one delays those
        behind it but does not shut them out; what is left in the end goes to the last.
        """
        chunks: list[Chunk] = []
        prefills: list[Sequence] = []
        preempted = self.num_preemptions
        for sequence in list(self._running.values()):
            if sequence.status is not Status.RUNNING:
                continue  # an older one has taken its blocks in this very loop
            if sequence.num_uncomputed > 1:
                prefills.append(sequence)  # has all blocks that its known tokens need
            elif self._grow(sequence):
                chunks.append(Chunk(sequence, sequence.num_computed, 1))

        budget = self._max_batch_tokens - len(chunks)
        lengths = []
        for sequence in prefills:
            lengths.append(self._share(sequence, budget))
            budget -= lengths[-1]
        copies: list[tuple[int, int]] = []
        # Budget is left only when each running sequence has a token of it, so decode steps alone
        # never exceed it. Whoever was preempted just now heads the queue: nobody passes the head.
        while self._waiting and budget and self.num_preemptions == preempted:
            sequence = next(iter(self._waiting.values()))
            if len(self._running) >= self._max_num_seqs or not self._admit(sequence, copies):
                break
            prefills.append(sequence)
            lengths.append(self._share(sequence, budget))
            budget -= lengths[-1]
        for index in reversed(range(len(prefills))):
            wanted = min(prefills[index].num_uncomputed, self._max_chunk) - lengths[index]
            lengths[index] += min(wanted, budget)
            budget -= min(wanted, budget)
        for sequence, length in zip(prefills, lengths, strict=True):
            if length:
                chunks.append(Chunk(sequence, sequence.num_computed, length))
        return Batch(chunks, copies)

    def commit(self, batch: Batch, output: StepOutput) -> list[Sequence]:
        """Take over what a step computed.

        A sequence that was finished or suspended since `schedule` is passed over, and so is one in
        `output.errors`: it stays where it was until somebody finishes it.

        Returns:
            The sequences that got tokens, in batch order.

        Raises:
            EngineError: the runner chose no token for a sequence, or several.
        """
        advanced = []
        for index, chunk in enumerate(batch.chunks):
            sequence = chunk.sequence
            if sequence.status is not Status.RUNNING or index in output.errors:
                continue
            samples = chunk.samples
            sequence.num_computed = chunk.end
            if self._prefix_cache:
                self._register(sequence, chunk)
            if not samples:
                continue
            if len(output.token_ids[index]) != 1:
                raise EngineError(
                    f"the runner chose {len(output.token_ids[index])} tokens for request "
                    f"{sequence.request_id}; allowed: 1"
                )
            sequence.token_ids += output.token_ids[index]
            sequence.cumulative_logprob += sum(output.logprobs[index])
            advanced.append(sequence)
        return advanced

    def finish(self, sequence: Sequence) -> None:
        """End a sequence of any status and free its blocks. A second time does nothing."""
        if sequence.status is not Status.FINISHED:
            self._withdraw(sequence)
            self._admitted.discard(sequence.request_id)
            sequence.status = Status.FINISHED

    def suspend(self, sequence: Sequence) -> None:
        """Take a sequence out of the queue or the batch; its full blocks stay in the cache.

        Does nothing to one that is finished or suspended.
        """
        if sequence.status in (Status.RUNNING, Status.WAITING):
            self._withdraw(sequence)
            sequence.status = Status.SUSPENDED
            self._suspended[sequence.request_id] = sequence

    def resume(self, sequence: Sequence) -> None:
        """Put a suspended sequence at the head of the queue; does nothing to any other."""
        if sequence.status is Status.SUSPENDED:
            self._withdraw(sequence)
            self._queue_first(sequence)

    def _share(self, sequence: Sequence, budget: int) -> int:
        """Tokens of a prompt in the first round: half the budget, but no crumbs."""
        half = max((budget + 1) // 2, self._pool.block_size)
        return min(half, budget, self._max_chunk, sequence.num_uncomputed)

    def _grow(self, sequence: Sequence) -> bool:
        """Give a decoding sequence the block of its next token; False if it had to yield.

        Its last block is its own: `_admit` hands out no other, and a block is named only when it
        is full. So a decode step never has to copy.
        """
        if sequence.num_computed < len(sequence.blocks) * self._pool.block_size:
            return True
        while not self._pool.num_free:
            youngest = next(reversed(self._running.values()))
            self._preempt(youngest)
            if youngest is sequence:
                return False
        sequence.blocks.append(self._pool.allocate())
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._withdraw(sequence)
        self._queue_first(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1

    def _admit(self, sequence: Sequence, copies: list[tuple[int, int]]) -> bool:
        """Let the head of the queue run if there are blocks for all its known tokens."""
        pool = self._pool
        num_tokens = len(sequence.token_ids)
        hashes = self._hashes_of(sequence, num_tokens) if self._prefix_cache else []
        cached = pool.lookup(hashes)
        # The last token is always computed: its logits choose the next one.
        computed = min(len(cached) * pool.block_size, num_tokens - 1)
        num_shared = computed // pool.block_size
        num_new = -(-num_tokens // pool.block_size) - num_shared
        revived = sum(pool.ref_count(block) == 0 for block in cached)
        if revived + num_new + self._num_growing() > pool.num_free:
            return False

        sequence.blocks = pool.acquire(hashes)
        new = [pool.allocate() for _ in range(num_new)]
        if len(cached) > num_shared:
            # All is cached, and the last token goes where others read: into a copy then. The
            # source may be evicted from now on, but a copy comes before any write of its step.
            source = sequence.blocks.pop()
            copies.append((source, new[0]))
            pool.release([source])
        sequence.blocks += new
        sequence.num_computed = computed
        del self._waiting[sequence.request_id]
        self._running[sequence.request_id] = sequence
        sequence.status = Status.RUNNING
        if sequence.request_id not in self._admitted:
            self._admitted.add(sequence.request_id)
            sequence.num_cached_tokens = computed
            self.num_cached_tokens += computed
            self.num_prompt_tokens += sequence.num_prompt_tokens
        return True

    def _num_growing(self) -> int:
        """Blocks to leave alone on admission: one for each running sequence that will need more.

        Without them a new sequence would take the last blocks and lose them in the next step.
        """
        size = self._pool.block_size
        return sum(
            len(sequence.blocks) * size < sequence.num_prompt_tokens + sequence.max_tokens - 1
            for sequence in self._running.values()
        )

    def _withdraw(self, sequence: Sequence) -> None:
        """Take a sequence out of where it is, with nothing in the KV cache: the one release point.

        Its tokens stay: should it run again, they are computed like a prompt.
        """
        for place in (self._running, self._waiting, self._suspended):
            place.pop(sequence.request_id, None)
        self._pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_computed = 0

    def _queue_first(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        self._waiting[sequence.request_id] = sequence
        self._waiting.move_to_end(sequence.request_id, last=False)

    def _register(self, sequence: Sequence, chunk: Chunk) -> None:
        size = self._pool.block_size
        first, end = chunk.start // size, chunk.end // size
        if first == end:
            return
        hashes = self._hashes_of(sequence, chunk.end)
        for index in range(first, end):
            self._pool.register(sequence.blocks[index], hashes[index])

    def _hashes_of(self, sequence: Sequence, num_tokens: int) -> list[bytes]:
        """Hashes of at least the full blocks in the first `num_tokens`, each computed once."""
        size = self._pool.block_size
        hashes = sequence.block_hashes
        for start in range(len(hashes) * size, num_tokens - size + 1, size):
            parent = hashes[-1] if hashes else root_hash(sequence.request.cache_salt)
            hashes.append(block_hash(parent, sequence.token_ids[start : start + size]))
        return hashes
